"""A thread that keeps the error of its work."""

from threading import Thread


class WorkingThread(Thread):
    """Daemon thread that does `work`. A test looks at `error` when it has ended."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def work(self) -> None:
        raise NotImplementedError
