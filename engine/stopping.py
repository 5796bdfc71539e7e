"""When an answer ends, by its newest token. Stop strings are text: the router matches them."""

from typing import NamedTuple

from core.sequence import FinishReason
from engine.sequence import Sequence


class Finish(NamedTuple):
    """Why an answer ended, and the EOS or stop token that ended it; both None while it goes on."""

    reason: FinishReason | None
    matched_stop_id: int | None


GOES_ON = Finish(None, None)


def finish_reason(sequence: Sequence) -> Finish:
    """Whether the newest known token of the answer ends it.

    Tokens sampled elsewhere count: a sequence that arrives with its first token needs `max_tokens - 1` more. A token
    that both stops the answer and is its last allowed one is a "stop". Before `min_tokens` only "length" ends an answer.
    `prefill_only` is not looked at: such a sequence leaves its engine after one token, whatever this says.

    Args:
        sequence: its newest known token already in; without any output the answer goes on.
    """
    num_tokens = sequence.num_output_tokens - sequence.num_awaited_tokens
    if num_tokens <= 0:
        return GOES_ON
    spec, sampling = sequence.spec, sequence.spec.sampling
    assert sampling.max_tokens is not None, f"{spec.sequence_id}: max_tokens is not set"
    token = sequence.token_ids[sequence.num_known_tokens - 1]
    if num_tokens >= sampling.min_tokens:
        is_eos = not sampling.ignore_eos and token in spec.eos_token_ids
        if is_eos or token in sampling.stop_token_ids:
            return Finish("stop", token)
    if num_tokens >= sampling.max_tokens:
        return Finish("length", None)
    return GOES_ON
