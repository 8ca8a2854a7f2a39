"""The web page in a real browser, before a real service on a real Mesos: submitted, watched, explained, killed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from framework.project.bundle import pack
from framework.service.requests import TrainingRequest, read_request, search_request
from tests.search.search_stage import search_spec
from tests.service.page_stage import CHROMIUM, ROOT, ServiceStage, WatchedPage, browser
from tests.training.job_stage import profile

HERE = Path(__file__).parent
COUNTING = ROOT / "tests/search/scripts/counting.py"
MARKUP = "<img src=x onerror=alert(1)>.py"

pytestmark = [pytest.mark.mesos, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceStage]:
    with ServiceStage(tmp_path_factory.mktemp("page")) as started:
        yield started


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def watched(service: ServiceStage, chromium: Browser) -> Iterator[WatchedPage]:
    with WatchedPage(chromium, service.url, viewport={"width": 1280, "height": 900}) as page:
        yield page
        assert page.troubles == []
        assert page.barriers() == []


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job" / MARKUP
    path.parent.mkdir()
    path.write_text((HERE / "page_job.py").read_text())
    return path


def request(**changes: Any) -> dict[str, Any]:
    values = {
        "script": MARKUP,
        "profile": profile().to_json(),
        "strategy": "ps",
        "max_workers": 1,
        "preload": [],
        "environment": {"PYTHONPATH": f"{ROOT / 'tests/faults/scripts'}{os.pathsep}{ROOT}"},
    }
    return TrainingRequest(**{**values, **changes}).to_json()


def test_a_job_is_submitted_watched_and_killed(
    watched: WatchedPage, service: ServiceStage, script: Path, tmp_path: Path
) -> None:
    asked, bundle = tmp_path / "request.json", tmp_path / "bundle.tar.gz"
    asked.write_text(json.dumps(request()))
    bundle.write_bytes(pack(script))
    page = watched.page

    page.goto(service.url)
    page.get_by_label("Token").fill(service.token)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="Submit", exact=True).click()
    page.get_by_label("Request").set_input_files(asked)
    page.get_by_label("Bundle").set_input_files(bundle)
    page.get_by_role("button", name="Submit").click()

    # It runs, its loss falls before our eyes, and we see where.
    page.locator(".title .state-running").wait_for()
    curve = page.locator("figure.curves").first
    curve.wait_for()
    before = int(curve.get_attribute("data-points") or 0)
    page.wait_for_function(
        "before => Number(document.querySelector('figure.curves').dataset.points) > before + 5", arg=before
    )
    assert "loss by step: " in (curve.get_by_role("img").get_attribute("aria-label") or "")
    speed = page.locator("figure.curves").nth(1)
    assert "smoothed; the plan predicts" in (speed.get_by_role("img").get_attribute("aria-label") or "")
    speed.get_by_text("As a table").click()
    expect(speed.get_by_role("columnheader")).to_have_text(["Step", "measured", "smoothed", "predicted by the plan"])
    assert curve.locator("canvas").count() == 1
    agent = page.get_by_role("region", name="agent agent-0")
    assert "worker:0" in agent.inner_text()
    assert "Live tasks" in page.locator("dl.facts").inner_text()

    # What the job calls itself and what it writes is text.
    assert MARKUP in page.locator("dl.facts").inner_text()
    page.get_by_role("log").get_by_text("<img src=x onerror=\"document.title='broken'\"> &amp;").wait_for()
    assert page.locator("img[src=x]").count() == 0

    page.get_by_role("button", name="Kill", exact=True).click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Kill", exact=True).click()
    page.get_by_role("button", name="Kill it").click()
    page.locator(".title .state-killed").wait_for()
    page.get_by_role("button", name="Submit again").wait_for()

    page.get_by_role("link", name="All jobs").click()
    page.get_by_role("list", name="jobs by state").get_by_role("button", name="1 killed").click()
    expect(page.get_by_role("combobox", name="State")).to_have_value("killed")
    expect(page.locator("table.jobs tbody tr")).to_have_count(1)
    page.get_by_label("Text").fill("no such job")
    page.get_by_text("No job matches these filters.").wait_for()


def test_says_why_a_job_waits(watched: WatchedPage, service: ServiceStage, script: Path) -> None:
    with service.client() as client:
        job = client.submit_request(read_request(request(constraints=["rack:IS:<b>none</b>"])), pack(script))
        page = watched.enter(service.token)
        assert page.url == f"{service.url}/"
        page.get_by_role("link", name=job.id).click()
        expect(page.locator("dl.facts")).to_contain_text("number 1, waiting for")
        why = page.get_by_role("region", name="Why it waits")
        page.wait_for_function(
            "text => document.querySelector('.why-waiting')?.innerText.includes(text)", arg="<b>none</b>"
        )
        assert why.locator(".sentence").inner_text()
        assert "agent-0" in why.get_by_role("table").inner_text()
        assert why.locator("b").count() == 0
        client.kill(job.id)
        page.locator(".title .state-killed").wait_for()


def test_resumes_a_killed_search(watched: WatchedPage, service: ServiceStage, tmp_path: Path) -> None:
    asked = search_request(search_spec(tmp_path, name="resumed"), COUNTING.name, ())
    with service.client() as client:
        client.submit_request(dataclasses.replace(asked, constraints=("rack:IS:none",)), pack(COUNTING))
        client.kill("resumed")
        client.wait_for_end("resumed", print)
        page = watched.enter(service.token)
        page.get_by_role("link", name="resumed").click()
        page.get_by_role("button", name="Resume").click()
        page.locator(".title .state-queued").wait_for()
        page.get_by_role("button", name="Kill", exact=True).wait_for()
        client.kill("resumed")


def test_shows_a_search_with_its_trials_and_slots(watched: WatchedPage, service: ServiceStage, tmp_path: Path) -> None:
    spec = search_spec(tmp_path, name="shown", arguments=("--steps", "20"), slot_mem_mib=256.0, max_slots=2)
    writing = tmp_path / "writing.py"
    more = "Path('<b>model').write_text(str(arguments.lr))\nprint('lr', arguments.lr, '<b>printed')\n"
    writing.write_text(f"{COUNTING.read_text()}{more}")
    with service.client() as client:
        job = client.submit_request(search_request(spec, writing.name, ()), pack(writing))
        page = watched.enter(service.token)
        page.get_by_role("link", name=job.id).click()
        expect(page.locator(".trials .state-finished")).to_have_count(3)
        assert "lr=0.1" in page.get_by_role("region", name="Trials by loss").inner_text()
        best = page.locator("tr.best")
        assert "lr=0.3" in best.inner_text()
        # The slices are asked for beside the trials, and may be those of a moment before.
        page.locator(".slice", has_text="2").first.wait_for()
        assert {slot.inner_text() for slot in page.locator(".slice").all()} == {"0", "1", "2"}
        expect(page.locator(".best-so-far p")).to_have_text(
            re.compile(r"Best: trial 2, loss [0-9.]+ \(finished\): lr=0.3")
        )
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy: Train with its parameters").click()
        page.get_by_text("copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == "python writing.py --steps 20 --lr=0.3"
        parameters = page.get_by_role("region", name="Parameters")
        said = parameters.get_by_role("img").get_attribute("aria-label") or ""
        assert said.startswith("parallel coordinates of 3 trials; the best, trial 2: lr 0.3, loss ")
        expect(parameters.locator("path")).to_have_count(3)
        expect(parameters).to_contain_text("shown once 5 trials have finished; 3 have")
        page.get_by_role("list", name="trials of the curves").get_by_role("button", name="1").click()
        page.get_by_text("trial 1: lr=0.2").wait_for()
        page.get_by_role("button", name="Output of trial 2").click()
        page.get_by_role("log", name="output of trial 2").get_by_text("lr 0.3 <b>printed").wait_for()
        page.get_by_text("earlier events of the kind “trial”").wait_for()
        assert "loss of 3 trials" in (page.locator(".curves").get_by_role("img").get_attribute("aria-label") or "")
        page.locator(".title .state-finished").wait_for()
        files = page.get_by_role("region", name="Files written")
        with page.expect_download() as download:
            files.get_by_role("button", name="trial-2/<b>model").click()
        trial = next(trial for trial in client.trials(job.id).trials if trial.number == 2)
        assert download.value.path().read_text() == str(trial.parameters["lr"])
        assert page.locator("b", has_text="model").count() == 0


def test_a_wrong_token_is_refused(service: ServiceStage, chromium: Browser) -> None:
    with WatchedPage(chromium, service.url) as watched:
        watched.page.goto(f"{service.url}/#token=wrong")
        watched.page.get_by_role("alert").get_by_text("does not know this token").wait_for()
        assert "wrong" not in watched.page.url
        assert all("401" in trouble for trouble in watched.troubles)


def test_fits_a_small_screen_and_is_used_by_keyboard(service: ServiceStage, chromium: Browser) -> None:
    with WatchedPage(chromium, service.url, viewport={"width": 400, "height": 800}, color_scheme="dark") as watched:
        page = watched.enter(service.token)
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        for view in ("Cluster", "Submit", "Jobs"):
            page.get_by_role("navigation").get_by_role("link", name=view).press("Enter")
            page.get_by_role("heading", level=1).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 400
            assert watched.barriers() == []
        assert watched.troubles == []


def test_reads_output_as_a_terminal_does(watched: WatchedPage, service: ServiceStage) -> None:
    page = watched.enter(service.token)
    lines = page.evaluate(
        """async () => {
          const { withChunks } = await import("./output.js");
          const of = (task, text, number) => ({ task, stream: "stdout", text, number });
          const first = withChunks(undefined, [of("worker:0", "10%\\r20", 1), of("worker:1", "a\\n\\nb", 2)]);
          const { lines } = withChunks(first, [of("worker:0", "%\\n\\x1b[31mred\\x1b[0m\\n", 3)]);
          return lines.map((line) => [line.task, line.text]);
        }"""
    )
    assert lines == [
        ["worker:0", "10%\r20%"],
        ["worker:1", "a"],
        ["worker:1", ""],
        ["worker:1", "b"],
        ["worker:0", "red"],
    ]


def test_says_that_the_service_is_away_and_continues_when_it_is_back(service: ServiceStage, chromium: Browser) -> None:
    with WatchedPage(chromium, service.url) as watched:
        page = watched.enter(service.token)
        service.end()
        page.get_by_text("has not answered since").wait_for()
        page.get_by_text("Running jobs continue without it").wait_for()
        assert page.locator(".dot.good").count() == 0
        page.get_by_text("no answer from the service").wait_for()
        assert page.get_by_role("heading", name="Jobs").is_visible()
        service.start()
        page.get_by_text("has not answered since").wait_for(state="detached")
        page.locator(".dot.good").wait_for()
        assert all("ERR_CONNECTION" in trouble or "Failed to load" in trouble for trouble in watched.troubles)


def test_says_that_jobs_end_with_a_service_of_a_private_mesos(service: ServiceStage, chromium: Browser) -> None:
    with WatchedPage(chromium, service.url) as watched:

        def answer(route: Route) -> None:
            response = route.fetch()
            route.fulfill(response=response, json={**response.json(), "private": True})

        watched.page.route("**/api/v1/cluster", answer)
        page = watched.enter(service.token)
        page.locator(".dot.good").wait_for()
        page.context.set_offline(True)
        page.get_by_text("and all running jobs have ended with it").wait_for()


def test_shows_the_rest_api(watched: WatchedPage, service: ServiceStage) -> None:
    """With no file of another host, under the page's content security policy, and with the token of this tab."""
    page = watched.enter(service.token)
    page.goto(f"{service.url}/docs")
    route = page.locator("#operations-jobs-list_jobs")
    route.get_by_role("button").first.click()
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table")).to_contain_text('"counts"')
    watched.enter(service.token)
