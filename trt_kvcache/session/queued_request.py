"""``QueuedRequest``: a submitted request as the queue sees it. What callers see of it is a :class:`RequestHandle`."""

from trt_kvcache.generation.request import GeneratedToken, Request, RequestSavepoint
from trt_kvcache.session.request_handle import RequestHandle, RequestStage, RequestState

#: What a :class:`QueuedRequest` needs to return to an earlier state: stage, text, and its request's.
QueuedSavepoint = tuple[RequestStage, str, RequestSavepoint]


class QueuedRequest:
    """One submitted request in the queue: where it is, what it has generated, and how it goes on.

    Parameters
    ----------
    request : Request
        Its prompt, without tokens so far. Its index is how many prompts were submitted before.
    """

    def __init__(self, request: Request) -> None:
        #: What chooses its tokens.
        self.request = request
        #: Where it is, or where it was when it ended.
        self.stage: RequestStage = "queued"
        #: Whether the caller ended it.
        self.cancelled = False
        #: The text that has become certain.
        self.text = ""
        #: The tokens generated so far.
        self.events: list[GeneratedToken] = []
        #: What callers see of it.
        self.handle = RequestHandle(self)

    @property
    def index(self) -> int:
        """How many prompts were submitted before."""
        return self.request.index

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.cancelled or self.request.finished

    @property
    def state(self) -> RequestState:
        """Where it is."""
        return "finished" if self.finished else self.stage

    @property
    def row(self) -> list[int]:
        """What a slot must hold before the next token can be chosen: the prompt and the tokens so far."""
        return [*self.request.prompt, *self.request.tokens]

    @property
    def last_token(self) -> int:
        """The token that was chosen last."""
        return self.request.tokens[-1]

    def add(self, event: GeneratedToken) -> None:
        """Add the token that its request has taken."""
        self.events.append(event)
        self.text += event.text

    def savepoint(self) -> QueuedSavepoint:
        """Return the state now, for one :meth:`rollback`."""
        return self.stage, self.text, self.request.savepoint()

    def rollback(self, savepoint: QueuedSavepoint) -> None:
        """Return to the state at ``savepoint``. A request that was cancelled since stays cancelled."""
        self.stage, self.text, request = savepoint
        self.request.rollback(request)
        del self.events[len(self.request.tokens) :]
