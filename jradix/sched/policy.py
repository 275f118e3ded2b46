"""Which waiting request is admitted next. Pure functions over the admission window."""
from __future__ import annotations

from typing import Sequence

import numpy as np

from jradix.sched.request import Request


def choose(window: Sequence[Request], matched: Sequence[int], blocked: Sequence[bool], max_bypass: int) -> int | None:
    """Index of the request to admit: the longest cached prefix first, ties in order of arrival.

    A request that was passed over `max_bypass` times goes before all others, so nobody starves. Preempted requests
    stand first in the window and go first: they hold a place that others would take from them again.

    Args:
      window: waiting requests in order.
      matched: cached tokens of each.
      blocked: True where the request waits for a prefix that a running one is computing.
    """
    open_places = [i for i in range(len(window)) if not blocked[i]]
    if not open_places:
        return None
    for i in open_places:
        if window[i].num_preemptions or window[i].num_passed_over >= max_bypass:
            return i
    return max(open_places, key=lambda i: (matched[i], -i))


def shares_pending_prefix(request: Request, matched: int, running: Request, granularity: int = 1) -> bool:
    """True when `running` is about to compute tokens that `request` would otherwise compute as well.

    Args:
      matched: cached tokens of `request`.
      granularity: tokens by which a match grows.
    """
    end = matched + granularity
    if request.first_logit is not None:
        longest = request.first_logit
    else:
        longest = request.num_tokens - 1
    to_share = running.num_prompt if running.replays else running.num_tokens
    return (running.num_computed < end <= min(longest, to_share) and running.is_prefilling
            and request.namespace is not None and request.namespace == running.namespace
            and request.tokens[matched] == running.tokens[matched]      # most pairs differ here already
            and np.array_equal(request.tokens[:end], running.tokens[:end]))
