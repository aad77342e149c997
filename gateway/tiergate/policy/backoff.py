"""How long to wait before another try. Pure: the randomness is the caller's."""

import random


def delay_s(attempt: int, rng: random.Random, base_s: float, cap_s: float) -> float:
    """Full jitter: evenly between 0 and `base_s` doubled with each attempt after the first, at most `cap_s`.

    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    bound = min(cap_s, base_s * 2.0 ** min(attempt - 1, 32))
    return rng.uniform(0.0, bound)
