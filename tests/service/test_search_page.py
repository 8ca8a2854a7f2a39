"""The page of stored searches, without a service: `dike tune --page` and `dike trials --page`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from dike.exceptions import BadInputError
from framework.search.store import Store
from framework.service.search_page import search_page
from tests.running import Running
from tests.search.stored_search import SPEC, add_search
from tests.service.page_stage import CHROMIUM, WatchedPage, browser
from tests.waiting import DEADLINE_S, wait_until

COUNTING = Path(__file__).parents[1] / "search/scripts/counting.py"
ADDRESS = re.compile(r"page: (http://\S+)/#token=([^/\s]+)(\S*)")


def client_of(address: str) -> httpx.Client:
    match = ADDRESS.search(f"page: {address}")
    assert match is not None
    return httpx.Client(
        base_url=f"{match[1]}/api/v1/",
        headers={"Authorization": f"Bearer {match[2]}"},
        trust_env=False,
        timeout=DEADLINE_S,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with a search that has ended and one that was interrupted."""
    url = f"sqlite:///{tmp_path}/searches.db"
    with contextlib.closing(Store(url)) as store:
        folder = str(tmp_path / "runs")
        add_search(store, dataclasses.replace(SPEC, checkpoint_dir=folder), [[0.5, 0.25], [0.5, 0.125]])
        store.create_search(dataclasses.replace(SPEC, name="cut", sampler_object="pickled"))
    return url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with search_page(url) as address, client_of(address) as client:
        yield client


@pytest.mark.integration
def test_each_search_is_shown_as_a_job(client: httpx.Client) -> None:
    jobs = client.get("jobs").json()["jobs"]
    assert [(job["id"], job["state"], job["yours"]) for job in jobs] == [
        ("cut", "killed", True),
        ("digits", "finished", True),
    ]
    assert jobs[0]["failure"] == "interrupted; dike tune --resume cut resumes it"
    assert (jobs[1]["best"], jobs[1]["trials"]) == (None, {"finished": 2})
    listed = client.get("jobs/digits/trials").json()
    assert [trial["loss"] for trial in listed["trials"]] == [0.25, 0.125]
    assert [one["loss"] for one in client.get("jobs/digits/losses").json()["losses"]["1"]] == [0.5, 0.125]
    for part in ("", "/slices", "/importance", "/outputs", "/explain", "/events", "/tasks", "/logs?trial=0"):
        assert client.get(f"jobs/digits{part}").status_code == 200, part
    assert client.get("jobs/cut/trials").json()["trials"] == []


@pytest.mark.integration
def test_nothing_can_be_changed(client: httpx.Client) -> None:
    assert client.get("me").json()["read_only"]
    for path in ("jobs", "jobs/digits/kill", "jobs/digits/again", "jobs/cut/resume", "jobs/cut/release"):
        refused = client.post(path)
        assert (refused.status_code, refused.json()["detail"]) == (
            403,
            "This page only shows searches; change them with the commands of dike.",
        )
    assert client.get("cluster").status_code == 404


@pytest.mark.integration
def test_only_who_has_the_address_sees_them(client: httpx.Client) -> None:
    assert client.get("jobs", headers={"Authorization": "Bearer guessed"}).status_code == 401
    assert client.get("jobs", headers={"Authorization": ""}).status_code == 401


@pytest.mark.integration
def test_what_changes_is_shown(url: str) -> None:
    with search_page(url) as address, client_of(address) as client, contextlib.closing(Store(url)) as store:
        store.open_search("cut")
        with store.lock("cut"):
            running = {"id": "cut", "state": "running", "failure": ""}
            wait_until(lambda: running.items() <= client.get("jobs/cut").json().items(), "the search to run")
        store.finish_search("it failed")
        wait_until(lambda: client.get("jobs/cut").json()["failure"] == "it failed", "its end")
        assert client.get("jobs/cut").json()["state"] == "failed"
        store.create_search(dataclasses.replace(SPEC, name="new"))
        wait_until(lambda: client.get("jobs/new").status_code == 200, "a new search")


@pytest.mark.integration
def test_what_is_deleted_or_begun_anew_is_shown_as_it_is(url: str) -> None:
    with search_page(url) as address, client_of(address) as client, contextlib.closing(Store(url)) as store:
        before = client.get("jobs/cut").json()["submitted_s"]
        store.open_search("cut")
        store.delete_search()
        wait_until(lambda: client.get("jobs/cut").status_code == 404, "the search to go")
        store.create_search(dataclasses.replace(SPEC, name="cut"))
        wait_until(lambda: client.get("jobs/cut").json().get("submitted_s", 0) > before, "the new one")


@pytest.mark.integration
def test_a_database_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("no database, " * 100)
    with pytest.raises(BadInputError, match=r"no\.db"), search_page(f"sqlite:///{tmp_path}/no.db"):
        pass


@pytest.mark.mesos
def test_a_search_is_shown_while_it_runs_and_later(tmp_path: Path) -> None:
    options = ("--param", "lr=0.1,0.2", "--name", "shown", "--page", "--format", "json", "--slot-mem", "256")
    diary = tmp_path / "diary"
    search = Running(tmp_path, "tune", COUNTING, *options, "--", "--steps", "100000", "--diary", diary)
    search.wait_for_text("page: ")
    match = ADDRESS.search(search.log)
    assert match is not None
    assert match[3] == "/jobs/shown"
    with client_of(match[0].removeprefix("page: ")) as client:

        def steps() -> list[int]:
            answer = client.get("jobs/shown/trials")
            return [trial["step"] for trial in answer.json()["trials"]] if answer.is_success else []

        search.wait_for(lambda: min(steps(), default=0) > 0, "two trials that train on the page")
        assert client.get("jobs/shown").json()["state"] == "running"
    for rate in (0.1, 0.2):
        (tmp_path / f"end-{rate}").touch()
    assert search.result()["complete"]

    later = Running(tmp_path, "trials", "shown", "--page")
    later.wait_for_text("page: ")
    match = ADDRESS.search(later.log)
    assert match is not None
    with client_of(match[0].removeprefix("page: ")) as client:
        assert client.get("jobs/shown").json()["trials"] == {"finished": 2}
        assert "loss 0." in client.get("jobs/shown/logs", params={"trial": 0}).text
    later.process.send_signal(signal.SIGINT)
    later.result()


@pytest.mark.integration
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_address_opens_the_search(url: str) -> None:
    with (
        browser() as chromium,
        search_page(url, "digits") as address,
        WatchedPage(chromium, address.partition("/#")[0]) as watched,
    ):
        page = watched.page
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_have_text("digits")
        assert page.url.endswith("/#/jobs/digits")
        expect(page.get_by_role("heading", name="Trials by loss, the least first")).to_be_visible()
        assert page.get_by_role("button", name="Submit again").count() == 0
        assert page.get_by_role("heading", name="Events").count() == 0
        page.get_by_role("link", name="All searches").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Searches")
        expect(page.get_by_role("link", name="cut")).to_be_visible()
        expect(page.get_by_role("navigation").get_by_role("link")).to_have_text(["Searches"])
        assert watched.troubles == []
        assert watched.barriers() == []
