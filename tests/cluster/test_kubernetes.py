"""The manifest of docs/many-hosts.md: it fits the schemas of the API, and its command trains on two hosts."""

import subprocess

import pytest
import yaml

from tests.cluster.programs import TRAIN, assert_trained, blocks, environment_of_scripts, printed_by_ranks
from tests.session import hosts
from tests.timeouts import PROGRAM_TIMEOUT_S

SERVICE, JOB = yaml.safe_load_all(blocks("Kubernetes: a script", "yaml")[0])
WHY_NOT = hosts.missing()


def an_object(*required, **fields):
    """A schema of the API: other fields are mistakes, as `kubectl apply --validate=strict` says."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def a_list(of):
    return {"type": "array", "items": of}


NUMBER, TEXT, SWITCH = {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
META = an_object(name=TEXT, labels=TEXTS, annotations=TEXTS, namespace=TEXT)
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
CONTAINER = an_object(
    "name", "image", name=TEXT, image=TEXT, command=a_list(TEXT), args=a_list(TEXT), workingDir=TEXT,
    env=a_list(an_object("name", name=TEXT, value=TEXT)),
    resources=an_object(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=a_list(an_object("name", "mountPath", name=TEXT, mountPath=TEXT, readOnly=SWITCH)),
)  # fmt: skip
VOLUME = an_object(
    "name", name=TEXT, emptyDir=an_object(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
    persistentVolumeClaim=an_object("claimName", claimName=TEXT, readOnly=SWITCH),
)  # fmt: skip
POD = an_object(
    "containers", containers=a_list(CONTAINER), volumes=a_list(VOLUME), subdomain=TEXT,
    restartPolicy={"enum": ["Never", "OnFailure"]}, nodeSelector=TEXTS,
)  # fmt: skip
SCHEMAS = {
    "Service": an_object(
        "apiVersion", "kind", apiVersion={"const": "v1"}, kind=TEXT, metadata=META,
        spec=an_object(clusterIP=TEXT, publishNotReadyAddresses=SWITCH, selector=TEXTS),
    ),
    "Job": an_object(
        "apiVersion", "kind", apiVersion={"const": "batch/v1"}, kind=TEXT, metadata=META,
        spec=an_object(
            "template", completions=NUMBER, parallelism=NUMBER, completionMode={"enum": ["NonIndexed", "Indexed"]},
            backoffLimit=NUMBER, template=an_object(metadata=META, spec=POD),
        ),
    ),
}  # fmt: skip
"""From the reference of the API: what a Service and a Job for ranks may say. The manifest was also checked once, by
hand, against the whole schemas of the versions 1.25, 1.31 and 1.37.
"""


@pytest.mark.parametrize("manifest", [SERVICE, JOB], ids=["Service", "Job"])
def test_the_manifest_fits_the_api(manifest):
    import jsonschema  # a second, which every worker would need that only looks for its tests

    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    with pytest.raises(jsonschema.ValidationError, match="'selektor' was unexpected"):
        jsonschema.validate({**manifest, "spec": {**manifest["spec"], "selektor": {}}}, SCHEMAS[manifest["kind"]])


def test_the_pods_find_each_other_and_mount_what_there_is():
    assert (SERVICE["kind"], JOB["kind"]) == ("Service", "Job")
    spec = JOB["spec"]["template"]["spec"]
    assert spec["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == JOB["spec"]["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made")
def test_the_command_trains_on_two_hosts_with_the_names_of_the_pods(network, tmp_path):
    """As Kubernetes starts it in each pod, with one rank instead of eight."""
    (tmp_path / "train.py").write_text(TRAIN)
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    pods = []
    for index, host in enumerate(network.hosts):
        command = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        command[command.index("--nproc-per-node=8")] = "--nproc-per-node=1"
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
        pods.append(host.spawn(*command, env=environment_of_scripts(), **options))
    printed = [pod.communicate(timeout=PROGRAM_TIMEOUT_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], printed
    assert_trained(printed_by_ranks("".join(printed)), ["wbh1", "wbh2"])
