"""Threads that compute on their own cores, and leave the caller's number alone."""

from __future__ import annotations

import threading

import torch

from seps.threads import computing_threads


def test_each_thread_has_its_own_number() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = computing_threads(2, "test")
        together = threading.Barrier(2)

        def work(_: int) -> int:
            together.wait(10)  # so that both threads take part
            torch.randn(64, 64) @ torch.randn(64, 64)
            return torch.get_num_threads()

        assert list(pool.map(work, range(2))) == [1, 1]
        assert torch.get_num_threads() == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
        pool.shutdown()
    finally:
        torch.set_num_threads(before)
