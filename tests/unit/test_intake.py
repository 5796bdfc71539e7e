"""What the router refuses for the sake of its own memory."""

import pytest

from core.errors import InvalidRequestError
from core.sampling import SamplingParams
from services.router.intake import MAX_PROMPT_LOGPROBS, Intake
from tests.scripted_parts import served_model

CONTEXT = 2 * MAX_PROMPT_LOGPROBS


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_more_prompt_log_probabilities_than_fit_are_refused_with_the_numbers(num_top: int) -> None:
    intake = Intake(served_model(CONTEXT))
    sampling = SamplingParams(prompt_logprobs=num_top, max_tokens=1)
    longest = MAX_PROMPT_LOGPROBS // (num_top + 1)
    assert intake.resolve(sampling, longest, CONTEXT).prompt_logprobs == num_top
    with pytest.raises(
        InvalidRequestError, match=rf"prompt_logprobs: {num_top} for {longest + 1} .*{MAX_PROMPT_LOGPROBS}"
    ):
        intake.resolve(sampling, longest + 1, CONTEXT)
    assert intake.resolve(SamplingParams(max_tokens=1), longest + 1, CONTEXT).prompt_logprobs is None
