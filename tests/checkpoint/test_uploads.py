"""Checkpoints to and from a remote store: killed between any two operations, what is listed as complete is complete."""

import os
import shutil
import zlib
from contextlib import suppress

import pytest

from parallel3d import remote_files
from parallel3d.checkpoint.directory import CheckpointDirectory, NewestCheckpoint
from parallel3d.checkpoint.fetch import fetch_into_cache, fetch_newest
from parallel3d.checkpoint.index import INDEX, decode_index
from parallel3d.checkpoint.remote_directory import PREVIOUS, RemoteDirectory, remote_name
from parallel3d.checkpoint.upload import Keep, UploadPass, take_lock
from parallel3d.errors import CheckpointError
from tests.checkpoint.test_crashes import FailingDisk
from tests.checkpoint.test_crashes import Killed as KilledOnDisk
from tests.support.memory_store import SECRET, CountedStore, Killed, files_of, register
from tests.support.small_checkpoints import assert_is, save

BOTH = Keep(last=2)


@pytest.fixture
def address(monkeypatch):
    register()
    monkeypatch.setattr(remote_files, "RETRY_S", (0.0, 0.0, 0.0))
    yield CountedStore.reset()
    CountedStore.reset()


def send(directory, address, *, keep=BOTH, continued_from=None):
    """One pass; returns its events and the lines of its retries."""
    events, lines = [], []
    remote = RemoteDirectory(address, log=lines.append)
    UploadPass(CheckpointDirectory(directory), remote, keep, events.append).run(continued_from=continued_from)
    return events, lines


def complete_steps(address):
    return [folder.step for folder, _ in RemoteDirectory(address).complete()]


def fetched(address, folder, disk=None, **options):
    """The newest complete checkpoint of a store, as a run would find it; and what was skipped."""
    found = fetch_newest(RemoteDirectory(address), CheckpointDirectory(folder, disk), **options)
    index = CheckpointDirectory(folder).find_newest_valid().index if found.path else None
    return NewestCheckpoint(path=found.path, index=index, damaged=()), found.skipped


def history(directory, address):
    """The first two checkpoints are sent; of another line of the run the store holds a later one. The next pass sends
    the third, sets that aside, and removes the first."""
    for step in (1, 2):
        save(directory, step, evaluation_loss=3.0 - step)
    send(directory, address)
    other = directory.with_name(f"{directory.name}-other")
    save(other, 4, evaluation_loss=9.0)
    send(other, address, keep=Keep())
    save(directory, 3, evaluation_loss=0.5)
    CountedStore.names = []


def assert_whole(address, path, data):
    """Every byte that the index of a folder lists is there; half of an index lists nothing."""
    files = files_of(address)
    try:
        index = decode_index(data, path)
    except CheckpointError:
        return
    for file in index.files:
        content = files[path.replace(INDEX, file.name)]
        assert len(content) == file.size and f"{zlib.crc32(content):08x}" == file.crc32


def next_pass(directory, address):
    send(directory, address, continued_from=2)


def test_killed_between_any_two_operations(tmp_path, address):
    """After each: every checkpoint that is listed has all its bytes, and there is always one to go on from; the next
    pass ends with what an undisturbed one leaves."""
    history(tmp_path / "whole", address)
    next_pass(tmp_path / "whole", address)
    num_operations, wanted = len(CountedStore.names), set(files_of(address))
    assert {"create", "write", "makedirs", "rm_file"} <= set(CountedStore.names) and num_operations > 15
    assert complete_steps(address) == [2, 3]
    newest = []
    for last in range(1, num_operations + 1):
        directory, address = tmp_path / f"run-{last}", CountedStore.reset()
        history(directory, address)
        CountedStore.last = last
        with pytest.raises(Killed):
            next_pass(directory, address)
        CountedStore.last = 10**9
        for path, data in files_of(address).items():
            if path.endswith(f"/{INDEX}"):
                assert_whole(address, path, data)
        found, skipped = fetched(address, tmp_path / f"fetched-{last}")
        assert_is(found, found.index.step)
        newest.append(found.index.step)
        next_pass(directory, address)
        assert complete_steps(address) == [2, 3]
        assert {"/".join([name[:13], name.split("/")[1]]) for name in files_of(address)} == {
            "/".join([name[:13], name.split("/")[1]]) for name in wanted
        }
    assert newest == sorted(newest, key=[4, 2, 3].index) and set(newest) == {4, 2, 3}


def test_a_checkpoint_of_another_line_keeps_its_files(tmp_path, address):
    history(tmp_path / "run", address)
    events, _ = send(tmp_path / "run", address, continued_from=2)
    (name,) = [event["name"] for event in events if event["event"] == "set_aside"]
    files = {path.partition("/")[2] for path in files_of(address) if path.startswith(name)}
    assert name.startswith("step-00000004") and PREVIOUS in files and INDEX not in files
    assert "rank-00000.safetensors" in files and complete_steps(address) == [2, 3]


def test_three_retries_are_seen_and_no_credentials(tmp_path, address):
    save(tmp_path, 1)
    CountedStore.failures = 3
    events, lines = send(tmp_path, address)
    assert [line.partition("; ")[2] for line in lines] == [f"retry {n} of 3 in 0 s" for n in (1, 2, 3)]
    assert complete_steps(address) == [1] and events[-1]["event"] == "uploaded"
    save(tmp_path, 2)
    CountedStore.failures = 4
    with pytest.raises(CheckpointError, match=r"ConnectionError, after 3 retries$") as caught:
        send(tmp_path, address)
    assert complete_steps(address) == [1]
    assert not any(word in f"{lines} {caught.value} {events}" for word in (SECRET, "user:"))
    assert send(tmp_path, address)[0][-1]["step"] == 2


def test_an_upload_goes_on_with_the_files_that_are_missing(tmp_path, address):
    save(tmp_path, 1)
    CountedStore.last = 5  # in the second file
    with pytest.raises(Killed):
        send(tmp_path, address)
    CountedStore.last, CountedStore.names = 10**9, []
    sent = []
    CountedStore.on_operation = staticmethod(lambda name, path: sent.append(path.rpartition("/")[2]))
    send(tmp_path, address)
    assert "rank-00000.safetensors" not in sent and "rank-00001.safetensors" in sent and complete_steps(address) == [1]


def test_one_that_the_run_removes_meanwhile_is_still_sent(tmp_path, address):
    path = save(tmp_path, 1)

    def remove(name, where):
        if name == "write" and path.exists():
            shutil.rmtree(path)

    CountedStore.on_operation = staticmethod(remove)
    send(tmp_path, address)
    assert not path.exists() and complete_steps(address) == [1]
    assert [name for name in os.listdir(tmp_path) if name.startswith("step-")] == []


def test_without_hard_links_it_is_left_and_the_next_one_sent(tmp_path, address, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    path = save(tmp_path, 1)

    def replace_it(name, where):
        if name == "write" and path.exists():
            shutil.rmtree(path)
            save(tmp_path, 2)

    CountedStore.on_operation = staticmethod(replace_it)
    send(tmp_path, address)
    assert complete_steps(address) == [2]
    assert {name.partition("/")[0][:13] for name in files_of(address)} == {"step-00000002"}


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_damaged_file_is_not_published(tmp_path, address, name):
    """Neither when it is sent nor when an earlier attempt has sent it already."""
    path = save(tmp_path, 1)
    CountedStore.last = 5  # the first file is there
    with suppress(Killed):
        send(tmp_path, address)
    CountedStore.last = 10**9
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-1] + b"x")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            send(tmp_path, address)
        assert complete_steps(address) == []
    (path / name).write_bytes(data)
    send(tmp_path, address)
    assert_is(fetched(address, tmp_path / "fetched")[0], 1)


def test_bytes_that_do_not_arrive_are_noticed(tmp_path, address):
    save(tmp_path, 1)
    CountedStore.lost_bytes = 3
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: [\d,]+ of [\d,]+ bytes are there"):
        send(tmp_path, address)
    assert not any(name.endswith(INDEX) for name in files_of(address))


def test_what_is_kept_there(tmp_path, address):
    """The last two, the best, and multiples of four; with a longer memory than the run's own folder."""
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.5, 6: 2.4, 7: 2.3}
    for step, loss in losses.items():
        save(tmp_path, step, evaluation_loss=loss, keep_last=1)
        send(tmp_path, address, keep=Keep(last=2, every=4))
    assert complete_steps(address) == [2, 4, 6, 7]
    send(tmp_path, address, keep=Keep())  # by hand: removes nothing
    assert complete_steps(address) == [2, 4, 6, 7]


def test_a_permanent_one_that_was_reduced_here_stays_whole_there(tmp_path, address):
    for step in (1, 2, 3):
        save(tmp_path, step, keep_every=1, weights_only=True, evaluation_loss=4.0 - step)
        send(tmp_path, address, keep=Keep(last=2, every=1))
    assert [index.has_optimizer_state for _, index in RemoteDirectory(address).complete()] == [True, True, True]


# --- back from there --------------------------------------------------------------------------------------------------


def change(address, end, data):
    """Replaces the content of the one file whose path ends so."""
    fs, path = remote_files.open_store(address)
    (name,) = [name for name in fs.find(path) if name.endswith(end)]
    fs.store[name] = type(fs.store[name])(fs, name, data(fs.store[name].getvalue()))


def test_what_is_damaged_there_is_skipped(tmp_path, address):
    for step in (1, 2, 3):
        save(tmp_path / "run", step, keep_last=3)
    send(tmp_path / "run", address, keep=Keep())
    names = {folder.step: folder.name for folder in RemoteDirectory(address).folders()}
    change(address, f"{names[3]}/rank-00001.safetensors", lambda data: data[:-1] + b"x")
    found, skipped = fetched(address, tmp_path / "a")
    assert_is(found, 2)
    assert len(skipped) == 1 and "rank-00001.safetensors is damaged" in skipped[0]
    change(address, f"{names[2]}/rank-00000.safetensors", lambda data: data[:-1])
    found, skipped = fetched(address, tmp_path / "b")
    assert_is(found, 1)
    assert len(skipped) == 2 and f"{names[2]} is not complete" in skipped[1]
    change(address, f"{names[1]}/{INDEX}", lambda data: data[:-1])
    found, skipped = fetched(address, tmp_path / "c")
    assert found.path is None and len(skipped) == 3


def test_weights_only_are_not_resumed_from(tmp_path, address):
    for step in (1, 2, 3):
        save(tmp_path / "run", step, keep_every=1, weights_only=True)
    send(tmp_path / "run", address, keep=Keep())
    fs, path = remote_files.open_store(address)
    for folder in RemoteDirectory(address).folders():
        if folder.step > 1:
            RemoteDirectory(address).remove(folder)
    found, skipped = fetched(address, tmp_path / "a", resumable=True)
    assert found.path is None and "holds weights only" in skipped[0]
    assert fetch_newest(RemoteDirectory(address), CheckpointDirectory(tmp_path / "b")).path is not None


def test_a_fetch_ends_at_any_operation(tmp_path, address):
    """The checkpoint is there whole or not at all, and the next fetch goes on."""
    save(tmp_path / "run", 1)
    send(tmp_path / "run", address)
    disk = FailingDisk(10**9, KilledOnDisk())
    fetched(address, tmp_path / "whole", disk)
    for last in range(1, len(disk.names) + 1):
        folder = tmp_path / f"run-{last}"
        with pytest.raises(KilledOnDisk):
            fetched(address, folder, FailingDisk(last, KilledOnDisk()))
        assert not CheckpointDirectory(folder).find_newest_valid().damaged
        assert_is(fetched(address, folder)[0], 1)
        assert os.listdir(folder) == ["step-00000001"]


def test_a_damaged_copy_here_is_replaced(tmp_path, address):
    path = save(tmp_path, 1)
    send(tmp_path, address)
    (path / "rank-00000.safetensors").write_bytes(b"")
    assert_is(fetched(address, tmp_path)[0], 1)


def test_the_address_of_one_checkpoint(tmp_path, address):
    for step in (1, 2):
        path = save(tmp_path / "run", step)
    send(tmp_path / "run", address)
    first, second = RemoteDirectory(address).folders()
    assert second.name == remote_name(2, (path / INDEX).read_bytes())
    assert_is(fetched(f"{address}/{first.name}", tmp_path / "a")[0], 1)
    assert fetched(address, tmp_path / "b", newer_than=2)[0].path is None
    cache = fetch_into_cache(RemoteDirectory(address), address, tmp_path / "cache")
    assert cache.path.name == "step-00000002" and cache.path.parent.name == second.name
    CountedStore.names = []
    assert fetch_into_cache(RemoteDirectory(address), address, tmp_path / "cache").path == cache.path


def test_a_target_that_can_not_be_written(address, monkeypatch):
    RemoteDirectory(address).probe()
    assert files_of(address) == {}
    CountedStore.failures = 1
    with pytest.raises(CheckpointError, match=r"can't be written: ConnectionError$"):
        RemoteDirectory(address).probe()
    monkeypatch.setattr(CountedStore, "lost_bytes", 1)
    with pytest.raises(CheckpointError, match="a small file came back changed"):
        RemoteDirectory(address).probe()


def test_one_process_at_a_time(tmp_path):
    lock = take_lock(tmp_path)
    assert take_lock(tmp_path) is None
    lock.close()
    take_lock(tmp_path).close()
