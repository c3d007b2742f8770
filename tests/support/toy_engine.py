"""An engine for weight updates whose workers are objects of the test."""

import threading
from queue import Empty, Queue


class ToyEngine:
    """An engine as its owner holds it: a thread for each worker, and what Engine answers."""

    def __init__(self, *workers):
        self.workers, self.asked, self.answers = workers, [], Queue()

    def begin(self, method, *arguments):
        self.asked.append((method, *arguments))
        for worker in self.workers:
            threading.Thread(target=self.run, args=(worker, method, arguments), daemon=True).start()

    def run(self, worker, method, arguments):
        try:
            answer = getattr(worker, method)(*arguments)
        except Exception as error:
            answer = error
        self.answers.put((worker.rank, answer))

    def result(self, timeout):
        try:
            answers = dict(self.answers.get(timeout=timeout) for _ in self.workers)
        except Empty:
            raise RuntimeError(f"engine: no answer within {timeout:g} seconds") from None
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise RuntimeError(f"engine: {answer}")
        return [answers[worker.rank] for worker in self.workers]

    def holds(self, weights, version):
        return all(own.is_exact(weights) and own.version == version for own in self.workers)
