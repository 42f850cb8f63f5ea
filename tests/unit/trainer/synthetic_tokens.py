"""Token records made up for what the trainer makes of them: which ids were prompt, which were sampled."""

from __future__ import annotations

from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, check, pack_logprobs, pack_tokens


def transcript(turns, *, versions=None, sampling=None, segments=(0,), mode="processed_logprobs", tail=()):
    """Return a record of turns (prompt ids, sampled ids); log-probs are -0.01 * id."""
    tokens, mask, spans, made = [], [], [], []
    for number, (prompt, answer) in enumerate(turns):
        start = len(tokens)
        tokens += [*prompt, *answer]
        mask += [0] * len(prompt) + [1] * len(answer)
        span = SampledSpan(
            start=start + len(prompt),
            stop=len(tokens),
            version=versions[number] if versions else 0,
            sampling=sampling[number] if sampling else Sampling(),
            dtype="float32",
            logprobs_mode=mode,
        )
        spans += [span] if answer else []
        made.append(
            Turn(
                start=start,
                sampled=start + len(prompt),
                stop=len(tokens),
                valid=True,
                action="",
                finish="stop",
                began_ms=0,
                generated_ms=0,
                ended_ms=0,
            )
        )
    tokens += tail
    mask += [0] * len(tail)
    record = Transcript(
        tokens=pack_tokens(tokens),
        mask=bytes(mask),
        logprobs=pack_logprobs([-0.01 * t * m for t, m in zip(tokens, mask, strict=True)]),
        spans=tuple(spans),
        turns=tuple(made),
        segments=segments,
    )
    check(record)
    return record
