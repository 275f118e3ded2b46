"""Writes `prompts_with_timestamps.jsonl`: prompts that could share nearly everything and share nearly nothing.

Each system prompt begins with the date and time, each classification with a request id, so that prompts part in their
first line and the long text behind it is computed again for every one. `jradix lint` finds both and says what moving
them behind the text gains.

    python examples/make_timestamps.py [prompts_with_timestamps.jsonl]
"""
from __future__ import annotations

import datetime
import json
import random
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from make_agents import AGENTS, EXAMPLES, MESSAGES, MODEL, SYSTEM

START = datetime.datetime(2024, 3, 6, 8, 1, 17)
STEP = datetime.timedelta(hours=7, minutes=43, seconds=29)
NUM_QUESTIONS = 3      # of each agent's task


def requests() -> Iterator[dict]:
    """The lines; the same every time."""
    rng = random.Random(0)
    questions = [f"Task: {task}{more}" for task, _ in AGENTS.values()
                 for more in ("", " Answer in one sentence.", " Say which tools you need.")[:NUM_QUESTIONS]]
    for number, question in enumerate(questions):
        now = (START + number * STEP).isoformat(sep=" ")
        messages = [{"role": "system", "content": f"Current date and time: {now}\n\n{SYSTEM}"},
                    {"role": "user", "content": question}]
        yield {"custom_id": f"agent-{number}", "messages": messages, "max_tokens": 24, "temperature": 0,
               "model": MODEL}
    for number, message in enumerate(MESSAGES[:8]):
        name = uuid.UUID(int=rng.getrandbits(128), version=4)
        yield {"custom_id": f"label-{number}", "prompt": f"Request id: {name}\n\n{EXAMPLES.format(message=message)}",
               "max_tokens": 16, "temperature": 0, "stop": ["\n"], "model": MODEL}


def main(path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for entry in requests():
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("prompts_with_timestamps.jsonl")))
