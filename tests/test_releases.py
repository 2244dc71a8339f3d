"""What is released is what was built, by what is locked; what runs there is named by its digest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outrider.redact import is_secret

ROOT = Path(__file__).parents[1]
WORKFLOWS = {file.stem: file for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
GRACE = {
    "lmsysorg/sglang:v0.5.11-rocm720-mi30x": "its digest could not be looked up without Docker Hub",
}
"""What is not pinned by a digest, and why."""
WRITES = {
    ("release", "publish"): {"id-token", "attestations"},
    ("release", "keep"): {"contents"},
}
"""The jobs that may write, and what."""


def loaded(name):
    return yaml.safe_load(WORKFLOWS[name].read_text())


def jobs():
    return [(name, job, said) for name in WORKFLOWS for job, said in loaded(name)["jobs"].items()]


def scripts(job):
    return [step["run"] for step in job["steps"] if "run" in step]


# -- pins


def unpinned_actions(text):
    """Return the actions without a commit, or without the version that it is in a comment."""
    lines = re.findall(r"^\s*(?:- )?uses:\s*(.*)$", text, re.MULTILINE)
    pinned = r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    return [line for line in lines if not re.fullmatch(pinned, line)]


def unpinned_images(text):
    """Return the images that a Dockerfile starts from without a digest."""
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    froms = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    found = [defaults.get(image.strip("${}"), image) for image in froms]
    assert found
    return [image for image in found if not re.search(r"@sha256:[0-9a-f]{64}$", image)]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned(name):
    text = WORKFLOWS[name].read_text()
    assert text.count("uses:") > 1
    assert unpinned_actions(text) == []


def test_an_action_has_one_commit():
    text = "".join(file.read_text() for file in WORKFLOWS.values())
    found = re.findall(r"uses: (\S+)@(\S+) # (\S+)", text)
    assert len({name for name, _, _ in found}) == len({*found}) >= 6


def test_images_are_pinned():
    found = [image for file in DOCKERFILES for image in unpinned_images(file.read_text())]
    assert len(DOCKERFILES) == 2
    assert sorted(found) == sorted(GRACE)


@pytest.mark.parametrize(
    "line", ["a/b@v4", "a/b@main", f"a/b@{'0' * 40}", f"a/b@{'0' * 39} # v1.0.0", "docker://alpine"]
)
def test_twin_an_unpinned_action(line):
    assert unpinned_actions(f"    - uses: {line}\n") == [line]


def test_twin_an_unpinned_image():
    assert unpinned_images("ARG TAG=latest\nFROM ${TAG}\nFROM a:1\n") == ["latest", "a:1"]


# -- workflows


def unlocked(script):
    """Return the commands that install what no hash holds."""
    installs = [line for line in script.splitlines() if re.search(r"\bpip\"? install\b", line)]
    return [line for line in installs if "--require-hashes" not in line]


def test_permissions_are_the_least():
    for name, job, said in jobs():
        given = said.get("permissions", loaded(name)["permissions"])
        writes = {scope for scope, how in given.items() if how != "read"}
        assert writes == WRITES.get((name, job), set()), (name, job)
        if writes:  # nothing of ours and nothing that is installed runs there
            ran = "\n".join(scripts(said))
            assert not re.search(r"\b(pip|python|npm|curl)\b", ran)
            assert "checkout" not in str(said["steps"])
    assert all(loaded(name)["permissions"] in ({}, {"contents": "read"}) for name in WORKFLOWS)


def test_scripts_take_no_text_of_others():
    """No title, branch or tag is put into a shell; no token is left for what runs there."""
    for name, job, said in jobs():
        for script in scripts(said):
            assert set(re.findall(r"\$\{\{\s*(\w+)", script)) <= {"matrix"}, (name, job)
        for step in said["steps"]:
            if "checkout@" in step.get("uses", ""):
                assert step["with"] == {"persist-credentials": False}
    text = "".join(file.read_text() for file in WORKFLOWS.values())
    assert "pull_request_target" not in text
    assert "secrets." not in text


def test_what_builds_is_locked():
    job = loaded("release")["jobs"]["build"]
    assert [line for script in scripts(job) for line in unlocked(script)] == []
    assert "pip install --require-hashes -r requirements/build.lock" in scripts(job)
    assert "python -m build --no-isolation" in "\n".join(scripts(job))
    lock = (ROOT / "requirements" / "build.lock").read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    required = re.search(r"^requires = \[(.*)\]$", pyproject, re.MULTILINE)[1]
    for package in re.findall(r'"([\w-]+)', required):
        assert re.search(rf"^{package}==", lock, re.MULTILINE), package
    # uploaded there, by the last step: before anything else runs
    assert "upload-artifact@" in job["steps"][-1]["uses"]


def test_what_is_not_locked_runs_after_it_and_alone():
    release = loaded("release")["jobs"]
    assert unlocked("\n".join(scripts(release["try"])))  # a twin: torch has no hash
    assert release["try"]["needs"] == "build"
    assert release["publish"]["needs"] == ["build", "try"]
    assert release["keep"]["needs"] == ["build", "publish"]


def test_files_are_published_and_attested_after_they_were_compared():
    for job, uses in (("publish", ["attest-build-provenance", "pypi-publish"]), ("keep", [])):
        steps = [str(step) for step in loaded("release")["jobs"][job]["steps"]]
        compared = next(n for n, step in enumerate(steps) if "sha256sum --check" in step)
        places = [next(n for n, step in enumerate(steps) if name in step) for name in uses]
        assert places == sorted(places)
        assert all(place > compared for place in places)
        assert compared < len(steps) - 1


@pytest.mark.parametrize(
    ("change", "good"),
    [
        (lambda dist: None, True),
        (lambda dist: (dist / "a.whl").write_text("another"), False),
        (lambda dist: (dist / "a.tar.gz").unlink(), False),
        (lambda dist: (dist / "b.whl").write_text("one more"), False),
    ],
)
def test_sums(tmp_path, change, good):
    """The steps themselves: what one job says of its files, the other compares."""
    release = loaded("release")["jobs"]
    build = next(step["run"] for step in release["build"]["steps"] if step.get("id") == "build")
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nmkdir dist; echo 1 > dist/a.whl; echo 2 > dist/a.tar.gz\n")
    fake.chmod(0o755)
    places = {"GITHUB_OUTPUT": str(tmp_path / "said"), "RUNNER_TEMP": str(tmp_path)}
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", **places}

    def bash(script, **more):
        command = ["bash", "-eo", "pipefail", "-c", script]  # as GitHub starts it
        return subprocess.run(command, cwd=tmp_path, env=environment | more, check=False).returncode

    assert bash(build) == 0
    sums = (tmp_path / "said").read_text().strip().removeprefix("sums=")
    change(tmp_path / "dist")
    for job in ("publish", "keep"):
        check = next(one for one in scripts(release[job]) if "--check" in one)
        assert (bash(check, SUMS=sums) == 0) == good
        assert bash(check, SUMS="") != 0


# -- images


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image(file):
    text = file.read_text()
    # its own wheel is what was just built, by what is locked
    own = "pip install --no-cache-dir --no-deps /tmp/dist/*.whl"
    assert [line for line in unlocked(text) if own not in line] == []
    assert "python3 -m build --no-isolation" in text
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0")
    names = re.findall(r"^(?:ENV|ARG) (\w+)", text, re.MULTILINE)
    assert [name for name in names if is_secret(name)] == []
    assert re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE) == ['["outrider-serve"]']
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().split()
    for path in " ".join(copied).split():
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored


@pytest.fixture
def image(tmp_path):
    """Return a function that does what an image does, with an `outrider` that says its command."""
    fake = tmp_path / "outrider"
    fake.write_text(f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], dict(os.environ))\n")
    fake.chmod(0o755)
    (tmp_path / "key").write_text("of-a-file\n")

    def start(*args, **variables):
        path = f"{tmp_path}:/usr/bin:/bin"
        return subprocess.run(
            [ROOT / "docker" / "serve", *args],
            env={"PATH": path, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return start


@pytest.mark.parametrize(
    ("args", "variables"),
    [
        ([], {}),
        (["--model-path", "m"], {}),
        (["--host", "0.0.0.0"], {}),
        (["--host=::"], {}),
        (["--host", "127.0.0.1", "--host", "0.0.0.0"], {}),
        (["--host", "127.0.0.1", "--ho", "0.0.0.0"], {}),
        (["--host", "127.0.0.1.example"], {}),
        (["--api-key", ""], {}),
        (["--api-key="], {}),
        (["--api-key", "k", "--api-key", ""], {}),
        (["--api-key", "k", "--api", ""], {}),
        (["--api-key", ""], {"OUTRIDER_API_KEY": "k"}),
        (["--admin-api-key", "k"], {}),
        (["--served-model-name", "--api-key"], {}),
        ([], {"OUTRIDER_API_KEY": ""}),
        ([], {"OUTRIDER_API_KEY_FILE": ""}),
    ],
)
def test_an_image_does_not_listen_without_a_key(image, args, variables):
    done = image(*args, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no API key" in done.stderr
    assert "set OUTRIDER_API_KEY" in done.stderr


@pytest.mark.parametrize(
    ("args", "variables", "key"),
    [
        (["--api-key", "k"], {}, []),
        (["--api-key=k", "--host", "0.0.0.0"], {}, []),
        (["--host", "127.0.0.1"], {}, []),
        (["--host=localhost"], {}, []),
        (["--model-path", "m"], {"OUTRIDER_API_KEY": "a b"}, ["--api-key", "a b"]),
        ([], {"OUTRIDER_API_KEY_FILE": "key"}, ["--api-key", "of-a-file"]),
    ],
)
def test_an_image_with_a_key(image, args, variables, key):
    done = image(*args, **variables)
    assert done.returncode == 0, done.stderr
    command = ["serve", "--host", "0.0.0.0", "--port", "30000", *key, *args]
    assert done.stdout.startswith(str(command))
    assert "OUTRIDER_API_KEY'" not in done.stdout  # the server's children need not have it


def test_an_image_whose_key_cannot_be_read(image):
    assert image(OUTRIDER_API_KEY_FILE="none").returncode != 0
