"""Tests of the files that run truenext under systemd, in containers and in Kubernetes: as files, and by systemd's own
checks where systemd is installed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.integration.broker_process import TRUENEXT
from tests.integration.environments import ROOT
from tests.integration.forked import completed_text
from truenext.broker.config import Configuration, configure, with_files
from truenext.cli.main import main
from truenext.cli.service_manager import SEND_TIMEOUT_S
from truenext.cli.stages.run import CLOSE_TIMEOUT_S
from truenext.model.url import parse_listener_url
from truenext.stage.service_run import STOP_TIMEOUT_S
from truenext.version import VERSION

SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
BROKER_UNIT = SYSTEMD / "truenext.service"
STAGES_UNIT = SYSTEMD / "truenext-stages@.service"
EXPOSURE_MAX = 2.0
USER = 65532

only_with_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze (Debian's package systemd)"
)


def parse(command: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command of `truenext`, without running the command. Raises: click.UsageError"""
    context, words = click.Context(main, info_name="truenext"), list(command)
    group: click.Command = main
    while isinstance(group, click.Group):
        found = group.get_command(context, words.pop(0))
        assert found is not None
        group = found
    return group.make_context("truenext", words, parent=context).params


# ---- systemd ----


def settings_of(unit: Path) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


@pytest.fixture
def installed_unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Unit as on a machine on which its command is installed."""
    unit: Path = request.param
    copy = tmp_path / unit.name.replace("@", "@shop")
    copy.write_text(unit.read_text().replace("/opt/truenext/bin/truenext", TRUENEXT))
    return copy


@only_with_systemd
@pytest.mark.parametrize("installed_unit", UNITS, ids=lambda unit: unit.name, indirect=True)
def test_unit_is_content_with_itself_and_hardened(installed_unit: Path) -> None:
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(installed_unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    check = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}"]
    done = subprocess.run([*check, str(installed_unit)], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE_MAX
    assert done.returncode == 0


def test_command_of_the_broker_unit_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "truenext.toml").write_text("")
    (line,) = settings_of(BROKER_UNIT)["ExecStart"]
    line = line.replace("%S", "/var/lib").replace("/etc/truenext", str(tmp_path))
    program, *command = shlex.split(line)
    options = parse(command)
    assert (program, str(options["data"])) == ("/opt/truenext/bin/truenext", "/var/lib/truenext/data")
    assert options["allow_anonymous"] is None and options["allow_plaintext"] is None


def test_command_of_the_stages_unit_is_a_command() -> None:
    (line,) = settings_of(STAGES_UNIT)["ExecStart"]
    _, *command = shlex.split(line.replace("$SERVICE", "shop:app").replace("$OPTIONS", "--health 8080"))
    assert parse(command)["target"] == "shop:app"


def test_stages_unit_waits_longer_than_a_service_takes_to_stop() -> None:
    (seconds,) = settings_of(STAGES_UNIT)["TimeoutStopSec"]
    assert int(seconds) > STOP_TIMEOUT_S + CLOSE_TIMEOUT_S


def test_watchdog_of_the_broker_unit_is_longer_than_a_notification_may_wait() -> None:
    settings = settings_of(BROKER_UNIT)
    (seconds,) = settings["WatchdogSec"]
    assert int(seconds) / 2 > SEND_TIMEOUT_S
    assert settings["Type"] == ["notify"]


# ---- Images ----


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, value) for name, _, value in (line.partition(" ") for line in lines)]


def test_image_runs_a_broker_without_rights() -> None:
    found = instructions()
    last = [name for name, _ in found][::-1].index("FROM")
    of_image = dict(found[-last - 1 :])
    assert of_image["USER"] == f"{USER}:{USER}"
    assert of_image["ENTRYPOINT"] == '["truenext"]'
    command = yaml.safe_load(of_image["CMD"])
    assert str(parse(command)["data"]).startswith(f"{of_image['VOLUME']}/")
    assert "--allow" not in (ROOT / "Containerfile").read_text()


def test_volume_of_the_image_is_made_and_owned_before_it_is_a_volume() -> None:
    text = (ROOT / "Containerfile").read_text()
    assert text.index(f"chown {USER}:{USER} /data") < text.index("VOLUME /data") < text.index(f"USER {USER}")


def probed(command: Sequence[str]) -> tuple[str, str, str, str]:
    """Return program, host, port and path of a health check."""
    program, option, code = command
    found = re.fullmatch(r"import urllib.request as u; u.urlopen\('http://(.*):(\d+)(/.*)', timeout=5\)", code)
    assert found is not None and option == "-c", command
    return (program, *found.groups())  # type: ignore[return-value]


def test_health_check_of_the_image_asks_the_health_server_of_its_command() -> None:
    found = dict(instructions())
    _, host, port, path = probed(yaml.safe_load(found["HEALTHCHECK"].partition("CMD ")[2]))
    assert parse(yaml.safe_load(found["CMD"]))["health"] == port
    assert (host, path) == ("127.0.0.1", "/live")


def test_files_that_the_image_copies_get_into_its_context() -> None:
    copied = [value.split()[:-1] for name, value in instructions() if name == "COPY" and "--from" not in value]
    context = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names} == context
    assert all((ROOT / name).exists() for name in context)


# ---- Compose ----


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the files of compose.yaml, with the modes of a clone by a user whose group may write to it, after the
    script of compose.yaml."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "deploy", clone / "deploy", ignore=shutil.ignore_patterns("secrets"))
    (clone / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "greetings.py", clone / "examples")
    for number, path in enumerate(each for each in clone.rglob("*") if each.is_file()):
        path.chmod(0o664 if number % 2 else 0o600)
    for _ in range(2):
        command = ["sh", str(clone / "deploy" / "compose" / "prepare.sh")]
        done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert done.stderr == b"", "the second run makes nothing"
    return clone


@pytest.fixture(scope="module")
def secrets(clone: Path) -> Path:
    """Folder with the secrets of compose.yaml."""
    return clone / "deploy" / "compose" / "secrets"


def test_compose_names_the_containerfile_for_docker_which_looks_for_a_dockerfile(compose: dict[str, Any]) -> None:
    build = compose["services"]["broker"]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).samefile(ROOT / "Containerfile")


def test_compose_mounts_files_and_secrets_that_are_there(compose: dict[str, Any], secrets: Path) -> None:
    declared = compose["secrets"]
    assert {Path(each["file"]).name for each in declared.values()} == {each.name for each in secrets.iterdir()}
    for service in compose["services"].values():
        assert set(service.get("secrets", ())) <= declared.keys()
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (ROOT / source).is_file()


def test_compose_mounts_files_that_its_users_can_read_and_only_their_owner_can_change(
    compose: dict[str, Any], clone: Path
) -> None:
    sources = {volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]}
    for source in sources - compose["volumes"].keys():
        assert (clone / source).stat().st_mode & 0o777 == 0o644, source


def test_compose_services_have_no_rights_and_no_writable_root(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert not {"--allow-anonymous", "--allow-plaintext"} & set(service.get("command", ()))
        assert all(each.startswith("127.0.0.1:") for each in service.get("ports", ()))


def with_paths(folder: Path, paths: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Write files into `folder`, with other paths."""
    for name, text in texts.items():
        for path, instead in paths.items():
            text = text.replace(path, str(instead))
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)


def check_listens_with_tls_alone(configuration: Configuration) -> None:
    assert all(parse_listener_url(url).has_tls for url in configuration.broker.listen)
    assert not configuration.broker.allow_anonymous and not configuration.broker.allow_plaintext
    assert configuration.users is not None and configuration.users["operator"].user.is_monitor


def test_broker_of_compose_takes_its_files(compose: dict[str, Any], secrets: Path, tmp_path: Path) -> None:
    folder = ROOT / "deploy" / "compose"
    with_paths(
        tmp_path,
        {"/run/secrets": secrets},
        {name: (folder / name).read_text() for name in ("truenext.toml", "users.toml")},
    )
    configuration = with_files(configure(tmp_path / "truenext.toml"))
    check_listens_with_tls_alone(configuration)
    broker = compose["services"]["broker"]
    command = [each.replace("/etc/truenext", str(tmp_path)) for each in broker["command"]]
    assert str(parse(command)["data"]) == "/data/broker"
    ports = {each.rpartition(":")[2] for each in broker["ports"]}
    assert ports == {str(parse_listener_url(url).port) for url in configuration.broker.listen}
    assert broker["environment"]["TRUENEXT_USER"] in (configuration.users or {})
    _, _, port, path = probed(broker["healthcheck"]["test"][1:])
    assert (configuration.broker.health, path) == (f"0.0.0.0:{port}", "/ready")


def test_prometheus_of_compose_scrapes_the_health_servers_and_has_the_alert_rules(compose: dict[str, Any]) -> None:
    services = compose["services"]
    configuration = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yaml").read_text())
    targets = {each["job_name"]: each["static_configs"][0]["targets"] for each in configuration["scrape_configs"]}
    assert targets == {"truenext": ["broker:8080"], "truenext-stages": ["greetings:8080"]}
    assert parse(services["greetings"]["command"])["health_at"] == "0.0.0.0:8080"
    mounted = {each.split(":")[1] for each in services["prometheus"]["volumes"]}
    assert set(configuration["rule_files"]) < mounted
    provider = yaml.safe_load((ROOT / "deploy" / "compose" / "grafana" / "dashboards.yaml").read_text())
    (folder,) = (each["options"]["path"] for each in provider["providers"])
    assert any(each.split(":")[1].startswith(f"{folder}/") for each in services["grafana"]["volumes"])


def test_service_of_compose_has_the_grants_that_it_needs(
    compose: dict[str, Any], secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "deploy" / "compose" / "users.toml").read_text()
    with_paths(tmp_path, {"/run/secrets": secrets}, {"users.toml": text})
    service = compose["services"]["greetings"]
    command = parse(service["command"])
    monkeypatch.chdir(ROOT / "examples")
    done = completed_text(
        *("stages", "grants", command["target"], "--users", str(tmp_path / "users.toml")),
        *("--user", service["environment"]["TRUENEXT_USER"]),
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Kubernetes ----


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = objects["StatefulSet"]["spec"]["template"]["spec"]
    return found


def references(pod: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for volume in pod["volumes"]:
        if "configMap" in volume:
            yield "configmap", volume["configMap"]["name"]
        else:
            yield "secret", volume["secret"]["secretName"]


def test_kubernetes_mounts_what_the_file_has_or_tells_to_make(objects: dict[str, Any], pod: dict[str, Any]) -> None:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    made = set(re.findall(r"kubectl create (?:(secret) (?:tls|generic)|(configmap)) (\S+)", text))
    made_names = {(kind or other, name) for kind, other, name in made}
    assert set(references(pod)) == made_names | {("configmap", objects["ConfigMap"]["metadata"]["name"])}
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in objects["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def test_kubernetes_selects_the_pods_of_the_broker(objects: dict[str, Any]) -> None:
    stateful = objects["StatefulSet"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    assert stateful["replicas"] == 1
    assert stateful["serviceName"] == objects["Service"]["metadata"]["name"]
    assert stateful["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"] == labels
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    ports = {each["port"] for each in objects["Service"]["spec"]["ports"]}
    assert ports | {8080} == {each["port"] for rule in policy["ingress"] for each in rule["ports"]}
    (container,) = stateful["template"]["spec"]["containers"]
    assert ports == {each["containerPort"] for each in container["ports"]} - {8080}, "metrics are for no client"


def test_kubernetes_pod_has_no_rights_and_time_to_stop(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert container["image"] == f"truenext:{VERSION}"
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
    assert pod["securityContext"]["runAsNonRoot"] is True
    context = container["securityContext"]
    assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False


def test_broker_of_kubernetes_takes_its_files(
    objects: dict[str, Any], pod: dict[str, Any], secrets: Path, tmp_path: Path
) -> None:
    for name in ("operator", "shop"):
        (tmp_path / name).write_text(f"password of {name}\n")
        (tmp_path / name).chmod(0o600)
    paths = {
        "/run/secrets/tls/tls.crt": secrets / "broker.pem",
        "/run/secrets/tls/tls.key": secrets / "broker.key",
        "/run/secrets/passwords": tmp_path,
    }
    with_paths(tmp_path, paths, objects["ConfigMap"]["data"])
    configuration = with_files(configure(tmp_path / "truenext.toml"))
    check_listens_with_tls_alone(configuration)
    (container,) = pod["containers"]
    options = parse([each.replace("/etc/truenext", str(tmp_path)) for each in container["args"]])
    assert str(options["data"]) == "/data/broker"
    claim = objects["StatefulSet"]["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    used = (configuration.broker.disk_limit or 0) + configuration.broker.history_bytes_max
    assert used < int(claim.removesuffix("Gi")) << 30
    limit = container["resources"]["limits"]["memory"]
    assert configuration.broker.memory_limit < int(limit.removesuffix("Gi")) << 30


@pytest.mark.parametrize(("probe", "path"), [("readinessProbe", "/ready"), ("livenessProbe", "/live")])
def test_kubernetes_probe_asks_the_health_server(
    objects: dict[str, Any], pod: dict[str, Any], probe: str, path: str
) -> None:
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert container[probe]["httpGet"] == {"path": path, "port": "health"}
    assert f'health = "0.0.0.0:{ports["health"]}"' in objects["ConfigMap"]["data"]["truenext.toml"]
