"""The compose file: valid by the specification, safe by default, and its commands are those of `fedpriv deploy`."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from pathlib import PurePosixPath as Posix
from typing import Any

import pytest
import yaml
from composed import COMPOSE, ROOT, Composed, image_environment, interpolated, services, settings, words
from deployments import SMALL, fedpriv, light
from packaging.requirements import Requirement

from fedpriv.deploy.containers import NODE_KEY
from fedpriv.deploy.up import Command, KeyFiles, executor, listener, superlink, supernode

KEYS = Posix("/keys")  # where a container sees its party's folder
PROFILES = ("three", "eight", "gpu", "wiretap")
NODES = {"three": 3, "eight": 8, "gpu": 3, "wiretap": 3}
SECURE = ("three", "eight", "gpu")


def test_the_file_is_valid_by_the_compose_specification(tmp_path: Path) -> None:
    """By its own JSON schema, as check-jsonschema ships it; which does refuse mistakes."""
    mistakes: dict[str, tuple[tuple[str, ...], object]] = {
        "an unknown key": (("services", "superlink", "comand"), "x"),
        "a text for a list": (("services", "superlink", "profiles"), "three"),
        "a list for a number": (("services", "superlink", "healthcheck", "retries"), [1]),
        "a number for a condition": (("services", "superlink", "depends_on", "setup", "condition"), 7),
        "a list for a mapping": (("volumes",), ["superlink"]),
    }
    for name, (where, value) in mistakes.items():
        content = yaml.safe_load(COMPOSE.read_text())
        spoil(content, where, value)
        (tmp_path / name).with_suffix(".yml").write_text(yaml.safe_dump(content))
    paths = [str(COMPOSE), *map(str, tmp_path.iterdir())]
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "-o",
        "json",
        *paths,
    ]
    said = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert {Path(error["filename"]).stem for error in said["errors"]} == set(mistakes)


def spoil(content: dict[str, Any], where: tuple[str, ...], value: object) -> None:
    for key in where[:-1]:
        content = content[key]
    content[where[-1]] = value


def keys_in(folder: Posix) -> KeyFiles:
    """Where a party's files are in its folder."""
    return KeyFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key", folder / "executors.secret")


def warm(name: str, served: str, keys: KeyFiles | None, *health: str) -> Command:
    """An executor in a container, where a launcher of its own runs what starts for each message."""
    address, of_it, *trust = executor(name, served, keys).arguments
    return Command(name, "fedpriv", ("deploy", "warm", "flower-superexec", address, of_it, *health, *trust))


def expected(name: str, nodes: int) -> Command:
    """The command of a service, from the one place that knows the commands."""
    plain = name.startswith("insecure-")
    short = name.removeprefix("insecure-").removesuffix("-gpu")
    keys = None if plain else keys_in(KEYS)
    prefix = "insecure-" if plain else ""
    kind, _, number = short.partition("-")
    match kind:
        case "superlink":
            return superlink("0.0.0.0", 8000, Posix("/tmp/superlink.db" if plain else "/state/superlink.db"), keys)
        case "listener":
            return listener("0.0.0.0", 9000, "insecure-superlink:8000", Posix("/deployment/heard"))
        case "gateway":
            at, there = ("--host", "0.0.0.0", "--port", "8000"), ("--server", "superlink:8000", "--keys", str(KEYS))
            return Command("gateway", "fedpriv", ("deploy", "gateway", *at, *there))
        case "serverapp":
            return warm(short, f"{prefix}superlink:8000", keys, "--health-server-address", "127.0.0.1:9099")
        case "clientapp":
            served = f"{prefix}supernode-{number}:9094"
            return warm(short, served, keys, "--health-server-address", "127.0.0.1:9099")
    server = "insecure-listener:9000" if plain else "gateway:8000"
    return supernode(int(number), nodes, server, "0.0.0.0", 9094, keys, None if plain else KEYS / NODE_KEY)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_commands_are_those_of_deploy(profile: str) -> None:
    found = services(profile, FEDPRIV_NODES=str(NODES[profile]))
    helpers = {name for name in found if name in ("setup", "admit", "insecure-setup")}
    for name in found.keys() - helpers:
        command = expected(name, NODES[profile])
        assert words(found[name]["command"]) == [command.program, *command.arguments], name
    nodes = [name for name in found if re.fullmatch(r"(insecure-)?supernode-\d", name)]
    apps = [name for name in found if re.fullmatch(r"(insecure-)?clientapp-\d(-gpu)?", name)]
    assert len(nodes) == len(apps) == NODES[profile]
    assert len(found) == 2 * NODES[profile] + len(helpers) + 3


def test_the_commands_for_several_machines_are_those_of_deploy() -> None:
    section = (ROOT / "docs" / "machines.md").read_text()
    blocks = "\n".join(section.split("```")[1::2]).replace("\\\n", " ")
    written = [words(line) for line in blocks.splitlines() if re.match("flower-|fedpriv deploy warm", line)]
    own, node = Posix("keys/superlink"), Posix("keys/supernode-0")
    there, here, server = "fl.example.org:9000", "127.0.0.1:9094", "127.0.0.1:8000"
    wanted = [
        superlink("127.0.0.1", 8000, Posix("superlink.db"), keys_in(own)),
        warm("serverapp", server, keys_in(own)),
        supernode(0, 3, there, "127.0.0.1", 9094, keys_in(node), node / NODE_KEY),
        warm("clientapp-0", here, keys_in(node)),
    ]
    assert written == [[each.program, *each.arguments] for each in wanted]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_service_is_contained(profile: str) -> None:
    found = services(profile)
    for name, each in found.items():
        assert each["user"] == "1000:1000", name
        assert (each["read_only"], each["cap_drop"]) == (True, ["ALL"]), name
        assert each["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r"fedpriv:\d+\.\d+\.\d+(-cuda)?", each["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in each.get("ports", ())), name
        assert set(each.get("depends_on", ())) <= set(found), name
        assert ("healthcheck" in each) != name.endswith(("setup", "admit")), name


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The source of each mounted path."""
    pairs = [
        (one["target"], one["source"]) if isinstance(one, dict) else (one.split(":")[1], one.split(":")[0])
        for one in service.get("volumes", ())
    ]
    return dict(pairs)


@pytest.mark.parametrize("profile", SECURE)
def test_no_party_sees_anothers_keys_and_nobody_goes_without(profile: str) -> None:
    for name, each in services(profile).items():
        command = words(each["command"])
        assert "--insecure" not in command, name
        if name == "setup":
            continue
        keys = mounts(each).get("/keys")
        kind, _, number = name.removesuffix("-gpu").partition("-")
        servers = {"superlink": "superlink", "serverapp": "superlink", "admit": "admission", "gateway": "gateway"}
        own = servers.get(kind, f"supernode-{number}")
        assert keys == own, name
        assert not [mount for mount in each["volumes"] if str(mount).endswith(":/keys")], f"{name} may write its keys"


NETWORKS = {
    "setup": {"server"},
    "admit": {"server"},
    "superlink": {"server"},
    "serverapp": {"server"},
    "gateway": {"server", "fleet"},
}


@pytest.mark.parametrize("profile", SECURE)
def test_clients_reach_the_gateway_and_see_no_others_uploads(profile: str) -> None:
    """Apps reach their own SuperNode, SuperNodes the gateway; of the deployment's folder apps see the seeds alone."""
    for name, each in services(profile).items():
        kind, _, number = name.removesuffix("-gpu").partition("-")
        wanted = {"supernode": {"fleet", f"client-{number}"}, "clientapp": {f"client-{number}"}}
        assert set(each["networks"]) == {**NETWORKS, **wanted}[kind], name
        shared = [mount for mount in each.get("volumes", ()) if isinstance(mount, dict)]
        if kind == "clientapp":
            assert [(mount["target"], mount["read_only"]) for mount in shared] == [("/deployment/seeds", True)], name
        assert not shared or kind in ("setup", "serverapp", "clientapp"), name
    networks = yaml.safe_load(COMPOSE.read_text())["networks"]
    assert [name for name, one in networks.items() if not (one or {}).get("internal")] == ["server"]


def test_one_service_builds_each_image_and_a_changed_host_makes_all_anew() -> None:
    content = yaml.safe_load(COMPOSE.read_text())["services"]
    building = {profile: [name for name, each in services(profile).items() if "build" in each] for profile in PROFILES}
    assert building == {
        "three": ["setup"],
        "eight": ["setup"],
        "gpu": ["setup", "serverapp-gpu"],
        "wiretap": ["insecure-setup"],
    }
    for name, each in content.items():
        assert each["pull_policy"] == ("build" if "build" in each else "never"), name
        assert each["labels"] == {"fedpriv.host": "${FEDPRIV_HOST:-}"}, name
    assert content["setup"]["build"]["args"] == {"TORCH": "cpu"}
    assert content["serverapp-gpu"]["build"]["args"] == {"TORCH": "", "PACKAGES": "gcc libc6-dev"}


def test_insecure_services_say_so_and_are_started_by_their_own_profile_only() -> None:
    content = yaml.safe_load(COMPOSE.read_text())["services"]
    for name, each in content.items():
        bare = "--insecure" in words(each["command"])
        assert not bare or name.startswith("insecure-"), name
        assert name.startswith("insecure-") == (each["profiles"] == ["wiretap"]), name
        assert each["profiles"], name
    assert settings()["COMPOSE_PROFILES"] == "three"


def test_the_gpu_profile_asks_for_gpus_where_apps_run() -> None:
    for name, each in services("gpu").items():
        devices = each.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert bool(devices) == name.endswith("-gpu"), name
        assert each["image"].endswith("-cuda") == name.endswith("-gpu"), name


def test_settings_have_no_secrets_and_every_variable_a_default() -> None:
    text = COMPOSE.read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used | {"COMPOSE_PROFILES"} == set(settings())
    assert not re.findall(r"\$\{\w+\}", text), "a variable without a default"
    assert not re.search(r"(?i)secret|password|token|key=", "\n".join(f"{k}={v}" for k, v in settings().items()))
    assert interpolated("${FEDPRIV_PORT:-1}", {}) == "1"


def dockerfile() -> list[str]:
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def test_the_image_is_pinned_and_runs_as_nobody_in_particular() -> None:
    lines = dockerfile()
    bases = [line for line in lines if line.startswith("FROM ")]
    assert bases[0] == "FROM scratch AS wheels"
    assert len(bases) == 3
    assert all(re.match(r"FROM python:\d+\.\d+\.\d+-[\w-]+ AS \w+$", line) for line in bases[1:])
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 1000:1000"]
    last = "\n".join(lines).split("\nFROM ")[-1]
    assert "COPY --from=build" in last
    assert len(re.findall(r"^COPY ", last, re.MULTILINE)) == 1


def test_what_is_copied_is_there_and_reaches_the_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in dockerfile() if line.startswith("COPY ") and "--from" not in line]
    for source in {part for parts in copied for part in parts}:
        assert (ROOT / source).exists(), source
        assert source in allowed, source
    assert allowed == {part for parts in copied for part in parts}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()


def test_a_wheel_is_built_from_exactly_what_the_build_has(tmp_path: Path) -> None:
    """Links that lead out of the copied folders would have nothing to point at."""
    for line in dockerfile():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", ROOT / source, tmp_path / source], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    (wheel,) = (tmp_path / "dist").iterdir()
    packed = zipfile.ZipFile(wheel).namelist()
    assert {"fedpriv/examples/quickstart.toml", "fedpriv/server/app.py"} <= set(packed)


def test_every_mounted_path_is_made_in_the_image() -> None:
    made = set(re.findall(r"(?<=\s)/[\w/-]+", next(line for line in dockerfile() if "install --directory" in line)))
    for profile in PROFILES:
        for name, each in services(profile).items():
            assert set(mounts(each)) <= made, name
    assert {path for path in image_environment().values() if path.startswith("/")} <= {
        *made,
        *(f"{path}/{part}" for path in made for part in ("runs", "seeds")),
        "/tmp",
        "/tmp/flower",
    }


def dependencies(
    name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> Iterator[tuple[str, Requirement]]:
    """Names of everything that a package needs, and which versions it takes."""
    for text in distribution(name).requires or ():
        one = Requirement(text)
        wanted = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*extras, ""))
        key = (re.sub(r"[-_.]+", "-", one.name).lower(), frozenset(one.extras))
        if not wanted:
            continue
        try:
            distribution(key[0])
        except PackageNotFoundError:
            continue
        yield key[0], one
        if key in seen:
            continue
        seen.add(key)
        yield from dependencies(*key, seen)


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "containers" / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = list(dependencies("fedpriv", frozenset(), set()))
    needed = {name for name, _ in wanted}
    cuda = {name for name in needed if name.startswith(("nvidia", "cuda")) or name == "triton"}
    assert needed - cuda <= set(pinned), f"not pinned: {sorted(needed - cuda - set(pinned))}"
    for name, one in wanted:
        assert name in cuda or one.specifier.contains(pinned[name], prereleases=True), one


@pytest.mark.slow
def test_a_run_on_exactly_the_commands_that_the_file_names(tmp_path: Path) -> None:
    """One SuperNode of three: the others' services differ in their number only, which a test above looks at."""
    composed = Composed(tmp_path, "three", nodes=1)
    (tmp_path / "small.toml").write_text(light(tmp_path, SMALL))
    flags = ("--set", "federation.clients=1", "--set", "federation.rounds=1")
    try:
        composed.up()
        assert "supernode-0" in composed.log("admit")
        done = fedpriv("deploy", "run", "small.toml", *flags, "--out", "run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        status = json.loads(fedpriv("deploy", "status", "--json", cwd=tmp_path).stdout)
    finally:
        composed.down()
    assert (status["online"], [run["status"] for run in status["runs"]]) == (1, ["finished:completed"])


def test_the_ray_cluster_has_the_pinned_versions_and_the_images_settings() -> None:
    """The fields are those of KubeRay's own schema, against which the file was checked when it was written."""
    cluster = yaml.safe_load((ROOT / "containers" / "raycluster.yaml").read_text())
    pinned = dict(line.split("==") for line in (ROOT / "containers" / "constraints.txt").read_text().splitlines()[2:])
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert cluster["spec"]["rayVersion"] == pinned["ray"]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    assert images == {f"{yaml.safe_load(COMPOSE.read_text())['x-image']['image']}-ray"}
