"""The thread on which a rank writes."""

import threading
import time
from concurrent.futures import wait

import pytest

from parallel3d.parallel.background import BackgroundExecutor


def is_there(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_work_is_done_in_order_whoever_gives_it():
    done: list[tuple[int, int]] = []
    executor = BackgroundExecutor("orderly")
    futures = []

    def give(giver: int) -> None:
        for number in range(50):
            futures.append(executor.submit(lambda number=number: done.append((giver, number))))

    givers = [threading.Thread(target=give, args=(giver,)) for giver in range(4)]
    for giver in givers:
        giver.start()
    for giver in givers:
        giver.join(300)
    assert len(futures) == 200 and not wait(futures, timeout=300).not_done
    assert all([number for giver, number in done if giver == who] == list(range(50)) for who in range(4))


def test_what_work_raises_comes_with_its_future_and_the_next_is_done():
    executor = BackgroundExecutor("brave")
    bad, good = executor.submit(lambda: 1 // 0), executor.submit(lambda: 7)
    assert good.result(10) == 7
    with pytest.raises(ZeroDivisionError):
        bad.result(10)


def test_no_thread_is_left_when_there_is_no_work_and_a_new_one_comes_for_more():
    executor = BackgroundExecutor("modest")
    for _ in range(3):
        assert executor.submit(lambda: is_there("modest")).result(10)
        deadline = time.monotonic() + 300
        while is_there("modest"):
            assert time.monotonic() < deadline
            time.sleep(0.001)
