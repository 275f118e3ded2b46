"""The text that a chat template puts around messages, taken from the template itself."""
from __future__ import annotations

from jradix.tokenizer import Tokenizer

_FIRST_MARK = 0xE000       # private use area: one character per message, which no template looks at
_NUM_MARKS = 6400


class ChatFrame:
    """What stands before, between and after the messages of a conversation, by their roles.

    The template is rendered with one mark in place of each content; what it does with the content itself (some strip
    white space) is not repeated.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._pieces: dict[tuple[tuple[str, ...], bool], list[str]] = {}

    def opening(self, roles: tuple[str, ...], role: str, *, is_generated: bool) -> str:
        """What comes after the messages of `roles` and before the content of one by `role`.

        Args:
          is_generated: the content is to be written by the model: what `add_generation_prompt` puts there.

        Raises:
          RequestError: the template refuses these roles.
          TokenizerError: there is no template.
        """
        if is_generated and roles:
            return self._around(roles, True)[-1]
        return self._around((*roles, role), False)[-2]

    def closing(self, roles: tuple[str, ...]) -> str:
        """What comes after the last message when nothing follows."""
        return self._around(roles, False)[-1]

    def _around(self, roles: tuple[str, ...], add_generation_prompt: bool) -> list[str]:
        key = roles, add_generation_prompt
        if key not in self._pieces:
            if len(roles) > _NUM_MARKS:
                raise ValueError(f"{len(roles)} messages: expected at most {_NUM_MARKS}")
            marks = [chr(_FIRST_MARK + i) for i in range(len(roles))]
            rendered = self._tokenizer.render_chat(
                [{"role": role, "content": mark} for role, mark in zip(roles, marks)],
                add_generation_prompt=add_generation_prompt)
            pieces = []
            for mark in marks:
                before, found, rendered = rendered.partition(mark)
                pieces.append(before if found else "")
            self._pieces[key] = [*pieces, rendered]
        return self._pieces[key]
