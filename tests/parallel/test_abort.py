"""The abort token: every wait ends, callbacks run once."""

import threading
import time

import pytest

from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken


def test_a_live_token_lets_everything_pass():
    token = AbortToken()
    token.check()
    token.sleep(0.001)
    assert not token.aborted and token.reason == ""


def test_the_first_reason_stays():
    token = AbortToken()
    token.abort("rank 3 died")
    token.abort("rank 4 died")
    assert token.aborted and token.reason == "rank 3 died"
    with pytest.raises(GenerationEnded, match="rank 3 died"):
        token.check()
    with pytest.raises(GenerationEnded, match="rank 3 died"):
        token.sleep(60)


def test_sleep_wakes_at_once():
    token = AbortToken()
    threading.Timer(0.05, token.abort, ["over"]).start()
    started = time.monotonic()
    with pytest.raises(GenerationEnded, match="over"):
        token.sleep(60)
    assert time.monotonic() - started < 30


def test_callbacks_run_once_and_see_the_reason():
    token, seen = AbortToken(), []
    token.on_abort(lambda: seen.append(token.reason))
    token.on_abort(lambda: seen.append("second"))
    assert seen == []
    token.abort("over")
    token.abort("again")
    assert seen == ["over", "second"]


def test_a_late_callback_runs_at_once():
    token, seen = AbortToken(), []
    token.abort("over")
    token.on_abort(lambda: seen.append(1))
    assert seen == [1]


def test_a_forgotten_callback_does_not_run():
    class Socket:
        closed = 0

        def close(self):
            self.closed += 1

    token, kept, forgotten = AbortToken(), Socket(), Socket()
    for each in (kept, forgotten):
        token.on_abort(each.close)
    token.remove_callback(forgotten.close)
    token.abort("over")
    assert (kept.closed, forgotten.closed) == (1, 0)


def test_a_callback_may_use_the_token():
    """A socket that closes itself takes its callback back: no deadlock on the token's lock."""
    token, seen = AbortToken(), []

    def close():
        token.remove_callback(close)
        token.abort("again")
        token.on_abort(lambda: seen.append(token.reason))

    token.on_abort(close)
    thread = threading.Thread(target=token.abort, args=("over",), daemon=True)
    thread.start()
    thread.join(timeout=300)
    assert not thread.is_alive() and seen == ["over"]


def test_many_threads_abort_one_reason_wins_and_callbacks_run_once():
    token, seen, gate = AbortToken(), [], threading.Barrier(8)
    token.on_abort(lambda: seen.append(token.reason))

    def race(number):
        gate.wait()
        token.abort(f"thread {number}")

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [token.reason]
