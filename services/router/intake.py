"""What a request must be before it costs anything: checked, tokenised, its defaults resolved."""

import secrets
from dataclasses import dataclass, replace

from core.errors import InvalidRequestError, NotFoundError
from core.model_config import ModelConfig
from core.sampling import SamplingParams
from services.router.api import GenerateCall, ModelCard
from services.router.chat_template import ChatTemplate
from services.router.tokenizer import Tokenizer, require_encodable

# Of one request, the alternatives included: the router holds them all until they are sent.
MAX_PROMPT_LOGPROBS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router knows of the model without a tensor library."""

    card: ModelCard
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate


class Intake:
    """Checks calls against the served model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def prompt_ids(self, call: GenerateCall) -> tuple[int, ...]:
        """The prompt as token ids: tokenised once, here, for all workers. Raises InvalidRequestError."""
        limit = self._model.card.max_model_len
        if call.token_ids is not None:
            self.require_length("token_ids", len(call.token_ids))
            self.require_ids("token_ids", call.token_ids)
            prompt = call.token_ids
        elif call.chat is not None:
            text = await self._model.chat_template.render_async(call.chat, max_model_len=limit)
            prompt = tuple(await self._model.tokenizer.encode_async(text, add_special=False))
        elif call.text is not None:
            require_encodable("prompt", call.text, max_model_len=limit)
            prompt = tuple(await self._model.tokenizer.encode_async(call.text, add_special=True))
        else:
            raise InvalidRequestError("prompt", "is missing; set one of text, token_ids or chat")
        if not prompt:
            raise InvalidRequestError("prompt", "has no tokens; at least 1 is needed")
        return prompt

    def resolve(self, sampling: SamplingParams, num_prompt_tokens: int, pool_tokens: int) -> SamplingParams:
        """Fill the defaults that depend on the prompt and check what depends on the model.

        Args:
            sampling: as the client gave it.
            num_prompt_tokens: of its prompt.
            pool_tokens: what the largest KV pool holds; a default max_tokens stays within it.
        Raises:
            InvalidRequestError: with the field, its value and the limit.
        """
        limit = self._model.card.max_model_len
        asked = sampling.max_tokens
        if num_prompt_tokens + (asked or 1) > limit:
            answer = f"max_tokens={asked}" if asked else "an answer of at least 1 token"
            raise InvalidRequestError(
                "prompt", f"{num_prompt_tokens} tokens and {answer} exceed the context limit of {limit} tokens"
            )
        self.require_ids("stop_token_ids", sampling.stop_token_ids)
        self.require_ids("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias))
        if sampling.prompt_logprobs is not None:
            num_entries = num_prompt_tokens * (sampling.prompt_logprobs + 1)
            if num_entries > MAX_PROMPT_LOGPROBS:
                raise InvalidRequestError(
                    "prompt_logprobs",
                    f"{sampling.prompt_logprobs} for {num_prompt_tokens} prompt tokens are {num_entries} values in all, at most"
                    f" {MAX_PROMPT_LOGPROBS}; ask for fewer or send a shorter prompt",
                )
        max_tokens = asked or max(min(limit, pool_tokens) - num_prompt_tokens, 1)
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"{sampling.min_tokens} is above the {max_tokens} tokens that remain for the answer"
            )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def require_model(self, model: str) -> None:
        """Raise NotFoundError unless `model` is the one served, or empty."""
        if model and model != self._model.card.name:
            raise NotFoundError(f"model {model!r} is not served here; {self._model.card.name!r} is")

    def require_length(self, field: str, num_tokens: int) -> None:
        """Raise InvalidRequestError for more tokens than the context holds."""
        limit = self._model.card.max_model_len
        if num_tokens > limit:
            raise InvalidRequestError(field, f"{num_tokens} tokens exceed the context limit of {limit} tokens")

    def require_ids(self, field: str, token_ids: tuple[int, ...]) -> None:
        """Raise InvalidRequestError unless every id is in the vocabulary."""
        vocab_size = self._model.card.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(field, f"{token_id} is not in [0, {vocab_size}), the model's vocabulary")
