"""`python -m jradix` is the command `jradix`."""
import sys

from jradix.cli import main

sys.exit(main())
