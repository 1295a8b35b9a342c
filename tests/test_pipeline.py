"""The pipeline: in order, bounded, with errors that are kept; forks and the interpreter's end."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from icecache.pipeline import Pipeline

posix = pytest.mark.skipif(sys.platform == "win32", reason="forks of POSIX")


@pytest.fixture
def gate():
    """An event that jobs wait for, set at the end of the test whatever happens."""
    event = threading.Event()
    yield event
    event.set()


def python(code):
    """Runs code in a process of its own; its output."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_jobs_are_done_in_order_by_one_thread():
    pipeline, done = Pipeline(), []
    jobs = [pipeline.submit(lambda i=i: done.append((i, threading.get_ident()))) for i in range(20)]
    for job in jobs:
        job.wait()
        assert job.error is None
    assert [i for i, _ in done] == list(range(20))
    assert {thread for _, thread in done} - {threading.get_ident()} and len(set(done)) == 20


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_takes_so_many_jobs_and_then_waits(depth, gate):
    pipeline, taken = Pipeline(depth), []

    def submit():
        for i in range(depth + 1):
            pipeline.submit(gate.wait)
            taken.append(i)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and len(taken) == depth
    gate.set()
    thread.join(10)
    assert len(taken) == depth + 1
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Pipeline(0)


def test_an_error_stays_with_its_job():
    pipeline = Pipeline()
    bad, good = pipeline.submit(lambda: 1 // 0), pipeline.submit(lambda: None)
    for _ in range(2):
        bad.wait()
        assert isinstance(bad.error, ZeroDivisionError)
    good.wait()
    assert good.error is None


def test_a_job_that_waits_is_dropped_and_one_that_runs_is_waited_for(gate):
    pipeline, done, begun = Pipeline(), [], threading.Event()

    def run():
        begun.set()
        gate.wait()
        time.sleep(0.05)
        done.append("first")

    first, second = pipeline.submit(run), pipeline.submit(lambda: done.append("second"))
    assert begun.wait(10)
    second.cancel()
    second.wait()
    assert second.error is None and done == []
    # What was dropped makes room at once.
    third = pipeline.submit(lambda: done.append("third"))
    gate.set()
    first.cancel()
    assert done[0] == "first" and first.error is None
    third.wait()
    assert done == ["first", "third"]
    third.cancel()


def test_a_pipeline_that_is_dropped_ends_its_thread():
    pipeline, threads = Pipeline(), []
    pipeline.submit(lambda: threads.append(threading.current_thread())).wait()
    assert threads[0].is_alive()
    del pipeline
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_at_the_end_of_the_interpreter_jobs_are_done():
    assert "done\ndone" in python("""
        import time
        from icecache.pipeline import Pipeline
        pipeline = Pipeline()
        for _ in range(2):
            pipeline.submit(lambda: (time.sleep(0.1), print("done", flush=True)))
    """)


@posix
def test_a_fork_has_a_thread_of_its_own_but_not_the_jobs():
    out = python("""
        import os, threading
        from icecache.pipeline import Pipeline
        gate, pipeline = threading.Event(), Pipeline()
        ended = pipeline.submit(lambda: None)
        ended.wait()
        running, waiting = (pipeline.submit(gate.wait) for _ in range(2))
        pid = os.fork()
        if pid == 0:
            ended.wait(), ended.cancel()
            for job in (running, waiting):
                for call in (job.wait, job.cancel):
                    try:
                        call()
                    except RuntimeError as error:
                        assert "forked" in str(error)
                    else:
                        raise AssertionError("a job that nobody does")
            for _ in range(3):
                pipeline.submit(lambda: print("in the child", flush=True)).wait()
        else:
            gate.set()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            waiting.wait()
            print("in the parent")
    """)
    assert out.count("in the child") == 3 and out.endswith("in the parent\n")
