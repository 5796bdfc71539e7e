"""Answers through all three services equal what the tokens' KV says they must be."""

from tests.local_stack import BLOCK, CONTEXT, Stack, expected, prompt_of

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 8 * BLOCK + 1)


async def test_every_length_gives_the_right_tokens(stack: Stack) -> None:
    for length in (*LENGTHS, CONTEXT - 1):
        for max_tokens in (1, 2, BLOCK):
            if length + max_tokens > CONTEXT:
                continue
            prompt = prompt_of(length)
            answered = await stack.router.answer(prompt=prompt, max_tokens=max_tokens)
            assert answered.tokens == expected(prompt, max_tokens), (length, max_tokens)
            assert answered.finish == "length"
            assert answered.done is not None
            assert (answered.done.prompt_tokens, answered.done.completion_tokens) == (length, max_tokens)
    await stack.until_idle()
