"""The pipeline: in order, bounded, with errors that are kept; forks and the interpreter's end."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from icecache.pipeline import Job, Pipeline

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


def submit(pipeline, work):
    job = Job(work)
    pipeline.submit(job)
    return job


def test_jobs_are_done_in_order_by_one_thread():
    pipeline, done = Pipeline(), []
    jobs = [
        submit(pipeline, lambda i=i: done.append((i, threading.get_ident()))) for i in range(20)
    ]
    for job in jobs:
        job.wait()
        assert job.error is None
    assert [i for i, _ in done] == list(range(20))
    assert {thread for _, thread in done} - {threading.get_ident()} and len(set(done)) == 20


def test_threads_may_submit_at_once():
    pipeline, jobs = Pipeline(depth=4), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            threads = [
                threading.Thread(target=lambda: jobs.append(submit(pipeline, lambda: None)))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pipeline.finish()
            assert all(job.is_over and job.error is None for job in jobs)
    finally:
        sys.setswitchinterval(interval)
    assert len(jobs) == 400


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_takes_so_many_jobs_and_then_waits(depth, gate):
    pipeline, taken = Pipeline(depth), []

    def submit_all():
        for i in range(depth + 1):
            submit(pipeline, gate.wait)
            taken.append(i)

    thread = threading.Thread(target=submit_all)
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
    bad, good = submit(pipeline, lambda: 1 // 0), submit(pipeline, lambda: None)
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

    first, second = submit(pipeline, run), submit(pipeline, lambda: done.append("second"))
    assert begun.wait(10)
    second.cancel()
    second.wait()
    assert second.error is None and done == []
    # What was dropped makes room at once.
    third = submit(pipeline, lambda: done.append("third"))
    gate.set()
    first.cancel()
    assert done[0] == "first" and first.error is None
    third.wait()
    assert done == ["first", "third"]
    third.cancel()


def test_a_pipeline_that_is_dropped_ends_its_thread():
    pipeline, threads = Pipeline(), []
    submit(pipeline, lambda: threads.append(threading.current_thread())).wait()
    assert threads[0].is_alive()
    del pipeline
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_at_the_end_of_the_interpreter_jobs_are_done():
    assert "done\ndone" in python("""
        import time
        from icecache.pipeline import Job, Pipeline
        pipeline = Pipeline()
        for _ in range(2):
            pipeline.submit(Job(lambda: (time.sleep(0.1), print("done", flush=True))))
    """)


@posix
def test_a_fork_has_a_thread_of_its_own_but_not_the_jobs():
    out = python("""
        import os, threading
        from icecache.pipeline import Job, Pipeline
        gate, pipeline = threading.Event(), Pipeline()
        ended, running, waiting = Job(lambda: None), Job(gate.wait), Job(gate.wait)
        pipeline.submit(ended)
        ended.wait()
        pipeline.submit(running)
        pipeline.submit(waiting)
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
                job = Job(lambda: print("in the child", flush=True))
                pipeline.submit(job)
                job.wait()
        else:
            gate.set()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            waiting.wait()
            print("in the parent")
    """)
    assert out.count("in the child") == 3 and out.endswith("in the parent\n")


def test_a_job_that_was_never_handed_over_can_be_cancelled():
    job = Job(lambda: 1 // 0)
    job.cancel()
    job.wait()
    job.run()
    assert job.is_over and job.error is None


@posix
def test_interrupts_at_any_time_leave_it_working():
    """An interval timer raises in the main thread, wherever it is."""
    out = python("""
        import signal, time
        from icecache.pipeline import Job, Pipeline

        class Interrupt(Exception):
            pass

        def interrupt(*_):
            raise Interrupt

        signal.signal(signal.SIGALRM, interrupt)
        pipeline, done, interrupts = Pipeline(), [], 0
        until = time.monotonic() + 2
        while time.monotonic() < until:
            job = None
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + (interrupts % 40) * 1e-5)
                job = Job(lambda: time.sleep(1e-4))
                pipeline.submit(job)
                job.wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupts += 1
                if job is not None:
                    job.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        last = Job(lambda: print("still working", flush=True))
        pipeline.submit(last)
        last.wait()
        assert interrupts > 100, interrupts
    """)
    assert out == "still working\n"
