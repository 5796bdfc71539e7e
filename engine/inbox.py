"""What other threads ask of the engine's, in order."""

import threading

from core.sequence import SequenceSpec

Message = SequenceSpec | str  # a sequence to add, or the id of one to abort


class Inbox:
    """Messages to the engine's thread, in order. Closed, it refuses new ones and still gives out those it has."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._is_woken = False
        self.is_closed = False

    def put(self, message: Message) -> bool:
        """Add one message; False when closed."""
        with self._changed:
            if not self.is_closed:
                self._messages.append(message)
                self._changed.notify()
            return not self.is_closed

    def wake(self) -> None:
        """End the next or the present wait of `take` without a message: something else changed."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Message]:
        """All messages; with `wait`, sleeps until there is one, or `wake`, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._is_woken or self.is_closed or not wait)
            self._is_woken = False
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Refuse messages from now on and wake the reader."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
