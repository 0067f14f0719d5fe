"""From records to numbers: acceptance length, speedup, their intervals, and how near they come to what is possible.

Time per token is that of decoding: the call without its first target pass, over the tokens after the first one.
"""

import statistics
from collections import defaultdict

import numpy as np

RESAMPLES = 2000


def whole_rounds(record: dict, max_new_tokens: int) -> list[tuple[int, int]]:
    """(kept, drafted) of the rounds that nothing cut: neither the stop, nor room for less than a whole block.

    Which rounds those are does not depend on what they kept, but for the one that holds the stop.
    """
    block = max(record["drafted"], default=0) + 1
    rounds = list(zip(record["kept"], record["drafted"]))
    if record["stopped"]:
        rounds = rounds[:-1]
    whole, emitted = [], record["tokens"] - sum(record["kept"])
    for kept, drafted in rounds:
        if max_new_tokens - emitted >= block:
            whole.append((kept, drafted))
        emitted += kept
    return whole


def bootstrap(statistic, *columns, seed: int = 0) -> tuple[float | None, float | None, float | None]:
    """A statistic and its 95% interval, resampling prompts.

    Args:
        statistic: maps arrays [R, n] to [R].
        columns: numbers of each prompt, n long each.

    Returns:
        Value, low, high; None where there is nothing, and no interval for a single prompt.
    """
    columns = [np.asarray(column, dtype=float) for column in columns]
    count = len(columns[0])
    if not count:
        return None, None, None
    value = float(statistic(*(column[None] for column in columns))[0])
    if count == 1:
        return value, None, None
    picks = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.percentile(statistic(*(column[picks] for column in columns)), [2.5, 97.5])
    return value, float(low), float(high)


def median(values):
    return np.median(values, axis=1)


def ratio_of_sums(above, below):
    return above.sum(axis=1) / below.sum(axis=1)


def summarise(result: dict) -> list[dict]:
    """One flat row for each set and method. Numbers that were not measured are None.

    `acceptance_length` is tau over all whole rounds, `acceptance_length_per_prompt` the mean of the prompts' own;
    `speedup` the median over prompts of plain's decoding seconds per token by the method's, `slowest` the least of
    them, `speedup_with_prefill` that of whole calls; `efficiency` is speedup / tau, and what the target's own pass and
    the weights' bytes let it be at most: `efficiency_bound`, `efficiency_bound_bytes`.
    """
    room, by_key = result["settings"]["max_new_tokens"], defaultdict(lambda: defaultdict(list))
    for record in result["records"]:
        by_key[record["set"], record["method"]][record["prompt"]].append(record)
    bounds = {(row["set"], row["method"]): row for row in result["own_pass"]}
    rows = []
    for (name, method), prompts in by_key.items():
        records = [record for turns in prompts.values() for record in turns]
        rounds = [[one for record in turns for one in whole_rounds(record, room)] for turns in prompts.values()]
        kept, counts = [[sum(k for k, _ in one) for one in rounds if one], [len(one) for one in rounds if one]]
        tau, tau_low, tau_high = bootstrap(ratio_of_sums, kept, counts)
        plain = by_key.get((name, "plain"), {})
        pairs = [(plain[prompt], turns) for prompt, turns in prompts.items() if prompt in plain]
        speedups = [_per_token(a) / _per_token(b) for a, b in pairs if _per_token(a) and _per_token(b)]
        wholes = [_per_token(a, whole=True) / _per_token(b, whole=True) for a, b in pairs]
        speedup, low, high = bootstrap(median, speedups)
        rates = [1 / _per_token(turns) for turns in prompts.values() if _per_token(turns)]
        compared = [record["same_as_plain"] for record in records if record["same_as_plain"] is not None]
        bound = bounds.get((name, method))
        weights = bound.get("bytes") if bound else None
        rows.append(
            {
                "set": name,
                "method": method,
                "prompts": len(prompts),
                "answers": len(records),
                "acceptance_length": tau,
                "acceptance_length_low": tau_low,
                "acceptance_length_high": tau_high,
                "acceptance_length_per_prompt": float(np.mean(np.divide(kept, counts))) if kept else None,
                "rounds": sum(counts),
                "speedup": speedup,
                "speedup_low": low,
                "speedup_high": high,
                "speedup_prompts": len(speedups),
                "slowest": min(speedups, default=None),
                "speedup_with_prefill": bootstrap(median, wholes)[0],
                "tokens_per_second": bootstrap(median, rates)[0],
                "prefill_ms": 1e3 * statistics.median(record["prefill_seconds"] for record in records),
                "agreement": sum(compared) / len(compared) if compared else None,
                "efficiency": speedup / tau if speedup and tau else None,
                "efficiency_bound": bound["one_token_ms"] / bound["round_ms"] if bound else None,
                "efficiency_bound_bytes": weights["target"] / sum(weights.values()) if weights else None,
                "peak_memory": max((one["peak_memory"] for one in records if one["peak_memory"]), default=None),
            }
        )
    return rows


def _per_token(turns: list[dict], whole: bool = False) -> float | None:
    """Seconds a token of one prompt's answers: of decoding, or of the whole calls."""
    tokens = sum(record["tokens"] - (not whole) for record in turns)
    seconds = sum(record["decode_seconds"] + whole * record["prefill_seconds"] for record in turns)
    return seconds / tokens if tokens else None
