"""Cluster files: what they may say, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from solver import Cluster, NodeClass
from solver.cluster import MAX_PAIRS, LinkError, PairCost
from solver.cluster_file import read_cluster, read_network
from solver.costs import NodeCosts, RackCosts, UniformCosts
from solver.units import GIB, parse_bytes, parse_duration

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
GOOD = """\
nodes:
  - name: gpu
    count: 2
    cpus: 8
    mem: 32GiB
    gpus: 4
    gpu_model: K80
    disk: 100GB
    network_gbps: 25
    rack: r1
  - name: cpu
    cpus: 2.5
    mem: 500MB
links:
  within_node_gbps: 100
  across_racks_gbps: 5
"""


def _read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    cluster = _read(tmp_path, GOOD)
    assert list(cluster.node_names()) == ["gpu-0", "gpu-1", "cpu"]
    gpu, cpu = cluster.nodes
    assert (gpu.cpus, gpu.mem_bytes, gpu.gpus, gpu.gpu_model) == (8.0, 32 * GIB, 4, "K80")
    assert (gpu.disk_bytes, gpu.network_gbps, gpu.rack) == (100 * 10**9, 25.0, "r1")
    assert (cpu.count, cpu.cpus, cpu.mem_bytes, cpu.gpus, cpu.rack) == (1, 2.5, 500 * 10**6, 0, None)
    assert (cluster.within_node_gbps, cluster.across_racks_gbps) == (100.0, 5.0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_good(path: Path) -> None:
    assert read_cluster(path).node_count >= 1


def test_there_are_four_examples() -> None:
    names = {path.name for path in EXAMPLES.glob("*.yaml")}
    assert names >= {"five-k80.yaml", "mixed.yaml", "300-nodes.yaml", "laptop.yaml"}
    assert read_cluster(EXAMPLES / "300-nodes.yaml").node_count == 300


@pytest.mark.parametrize(
    ("text", "size"),
    [("32GiB", 32 * GIB), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("12", 12), (4096, 4096), ("2tb", 2 * 10**12)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "32 parsecs", "-1GiB", True, None, [1], "1e400"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="a size is"):
        parse_bytes(text)


def test_times_are_read() -> None:
    assert [parse_duration(text) for text in ("30d", "1.5 h", "90min", "45s")] == [2_592_000, 5400, 5400, 45]
    for text in ("", "30", "d", "-1d", "1w", "1d 2h", "inf d"):
        with pytest.raises(ValueError, match="a time is a number with d, h, min or s behind it"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("cpus: 8", "cpus: eight", 4, "cpus"),
        ("cpus: 8", "cpus: true", 4, "cpus"),
        ("cpus: 8", "cpus: 0", 4, "greater than 0"),
        ("cpus: 8", "cpus: -3", 4, "greater than 0"),
        ("cpus: 8", "cpus: .inf", 4, "finite"),
        ("count: 2", "count: 0", 3, "greater than 0"),
        ("count: 2", "count: 1.5", 3, "count"),
        ("mem: 32GiB", "mem: 32 sacks", 5, "32GiB or 500MB"),
        ("mem: 32GiB", "mem: 0", 5, "greater than 0"),
        ("mem: 32GiB", "mem: 128", 5, "128 is 128 bytes, too little for a machine; write the unit, such as 128GiB"),
        ("mem: 32GiB", "mem: -5GiB", 5, "32GiB or 500MB"),
        ("gpus: 4", "gpus: -1", 6, "greater than or equal to 0"),
        ("gpu_model: K80", "gpu_model: 80", 7, "string"),
        ("network_gbps: 25", "network_gbps: 0", 9, "greater than 0"),
        ("rack: r1", "colour: red", 10, "'colour' is not known"),
        ("    mem: 500MB\n", "", 11, "'mem' is missing"),
        ("name: cpu", "name: gpu-1", 11, "'gpu-1' is taken by line 2"),
        ("name: cpu", "name: ''", 11, "name"),
        ("rack: r1", "rack: r1\n    cpus: 9", 11, "duplicate key"),
        ("across_racks_gbps: 5", "across_racks_gbps: 0", 16, "greater than 0"),
        ("across_racks_gbps: 5", "between_racks: 5", 16, "known keys are within_node_gbps, across_racks_gbps"),
        ("across_racks_gbps: 5", "across_racks_cost: 0", 16, "greater than 0"),
        ("across_racks_gbps: 5", "within_rack_cost: -1", 16, "greater than 0"),
        ("across_racks_gbps: 5", "within_rack_cost: 0.05", 16, "less than 0.1, the 'within_node_cost'"),
        ("across_racks_gbps: 5", "across_racks_cost: 0.5", 16, "less than 1, the 'within_rack_cost'"),
        ("across_racks_gbps: 5", "pairs: 7", 16, "list"),
        ("across_racks_gbps: 5", "pairs: [{between: [gpu], cost: 2}]", 16, "takes two machines, or classes"),
        ("across_racks_gbps: 5", "pairs: [{between: [gpu, cpu, gpu], cost: 2}]", 16, "takes two machines, or classes"),
        ("across_racks_gbps: 5", "pairs: [{between: [gpu, cpu], cost: 2, price: 2}]", 16, "keys are between, cost"),
        ("across_racks_gbps: 5", "pairs: [{between: [gpu, cpu], cost: 0}]", 16, "greater than 0"),
        ("across_racks_gbps: 5", "pairs: [{between: [gpu, cpu], cost: .nan}]", 16, "finite"),
        ("across_racks_gbps: 5", "pairs: [{between: [gpu, cpu], cost: 0.05}]", 16, "costs 0.05, less than 0.1"),
        (
            "across_racks_gbps: 5",
            "pairs: [{between: [gpu, tpu], cost: 2}]",
            16,
            "no machine 'tpu'; the classes of machines",
        ),
        ("across_racks_gbps: 5", "pairs: [{between: [cpu, cpu], cost: 2}]", 16, "'cpu' is paired with itself"),
        ("links:", "linx:", 14, "'linx' is not known; known keys are nodes, links"),
        ("links:", "links: [", 16, "not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(BadInputError) as caught:
        _read(tmp_path, GOOD.replace(old, new))
    message = str(caught.value)
    assert f"cluster.yaml, line {line}:" in message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just text"])
def test_a_file_without_a_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"line 1: a cluster file is a mapping with the key 'nodes'"):
        _read(tmp_path, text)


@pytest.mark.parametrize("text", ["nodes: []", "links: {}\nnodes: []"])
def test_no_node(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=rf"line {text.count(chr(10)) + 1}: there is no node"):
        _read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "none.yaml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"nodes: \xff\xfe")
    with pytest.raises(BadInputError, match="not UTF-8"):
        read_cluster(path)


def test_a_cluster_made_by_hand_is_checked_too() -> None:
    with pytest.raises(BadInputError, match="at least one node"):
        Cluster(())
    twin = NodeClass(name="a", cpus=1.0, mem_bytes=GIB)
    with pytest.raises(BadInputError, match="called 'a'"):
        Cluster((twin, twin))


def _links(tmp_path: Path, *lines: str) -> Cluster:
    nodes = GOOD.partition("links:")[0]
    return _read(tmp_path, nodes + "links:\n" + "".join(f"  {line}\n" for line in lines))


def test_without_costs_every_link_costs_the_same(tmp_path: Path) -> None:
    assert _read(tmp_path, GOOD).costs() == UniformCosts(0.1, 1.0)
    assert _links(tmp_path, "within_node_cost: 0.5", "within_rack_cost: 2").costs() == UniformCosts(0.5, 2.0)


def test_a_cost_across_racks_makes_racks_matter(tmp_path: Path) -> None:
    costs = _links(tmp_path, "within_rack_cost: 2", "across_racks_cost: 8").costs()
    assert costs == RackCosts({"gpu-0": "r1", "gpu-1": "r1", "cpu": None}, 0.1, 2.0, 8.0)
    assert [costs.between("gpu-0", other) for other in ("gpu-0", "gpu-1", "cpu")] == [0.1, 2.0, 8.0]


def test_pairs_are_machines_or_classes(tmp_path: Path) -> None:
    costs = _links(
        tmp_path,
        "within_rack_cost: 2",
        "pairs:",
        "  - between: [cpu, gpu]",
        "    cost: 2.5",
        "  - between: [gpu, gpu]",
        "    cost: 1.5",
        "  - between: [gpu-1, gpu-0]",
        "    cost: 1.5",
    ).costs()
    assert costs == NodeCosts(
        {("gpu-0", "cpu"): 2.5, ("gpu-1", "cpu"): 2.5, ("gpu-0", "gpu-1"): 1.5}, within_node=0.1, otherwise=2.0
    )
    one = _links(tmp_path, "pairs: [{between: [gpu-1, cpu], cost: 2.5}]").costs()
    assert [one.between("cpu", other) for other in ("gpu-0", "gpu-1", "cpu")] == [1.0, 2.5, 0.1]


def test_links_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        _links(tmp_path, "pairs:", "  - {between: [gpu, cpu], cost: 2}", "  - {between: [cpu, gpu-1], cost: 3}")
    message = str(caught.value)
    assert "cluster.yaml, line 17: contradictory links" in message
    assert "'gpu-1' and 'cpu' is 3 here and 2 by an earlier pair" in message
    racks = "across_racks_cost: 4"
    with pytest.raises(BadInputError, match=r"line 16: contradictory links: .* is 3 here and 4 by their racks"):
        _links(tmp_path, racks, "pairs: [{between: [gpu, cpu], cost: 3}]")
    with pytest.raises(BadInputError, match=r"line 16: contradictory links: .* is 4 here and 1 by their racks"):
        _links(tmp_path, racks, "pairs: [{between: [gpu, gpu], cost: 4}]")
    assert isinstance(_links(tmp_path, racks, "pairs: [{between: [gpu, cpu], cost: 4}]").costs(), RackCosts)


def test_links_made_by_hand_are_checked_too() -> None:
    nodes = (NodeClass(name="a", count=2000, cpus=1.0, mem_bytes=GIB), NodeClass(name="b", cpus=1.0, mem_bytes=GIB))
    with pytest.raises(LinkError, match=r"^There is no machine 'c'; the classes of machines are a, b\.$") as caught:
        Cluster(nodes, pairs=(PairCost("a", "b", 2.0), PairCost("a", "c", 2.0)))
    assert caught.value.key == ("links", "pairs", 1)
    with pytest.raises(LinkError, match=f"4,000,000 pairs of machines, more than {MAX_PAIRS:,}; use racks"):
        Cluster(nodes, pairs=(PairCost("a", "a", 2.0),))
    for field in ("within_node_gbps", "across_racks_gbps", "within_node_cost"):
        with pytest.raises(LinkError, match=rf"'{field}' is 0; it must be more than 0"):
            Cluster(nodes, **{field: 0.0})  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="'network_gbps' of 'b' is 0; it must be more than 0"):
        Cluster((nodes[0], NodeClass(name="b", cpus=1.0, mem_bytes=GIB, network_gbps=0.0)))


def test_a_network_file_says_more_of_the_machines_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "network.yaml"
    path.write_text(
        "links: {across_racks_gbps: 4, pairs: [{between: [a, b], cost: 3}, {between: [a, gone], cost: 2}]}\n"
        "nodes: [{name: a, network_gbps: 2.5}, {name: many-1, rack: r2}, {name: b, rack: r1}, {name: gone, rack: r9}]\n"
    )
    network = read_network(path)
    nodes = [NodeClass(name=name, cpus=4, mem_bytes=8 * GIB) for name in ("a", "b/S1")]
    nodes.append(NodeClass(name="many", count=3, cpus=4, mem_bytes=8 * GIB, network_gbps=25))
    known = network.of(Cluster((*nodes, NodeClass(name="b", cpus=1, mem_bytes=GIB)), within_node_gbps=32))
    assert known.across_racks_gbps == 4
    assert known.within_node_gbps == 32
    assert known.pairs == (PairCost("a", "b", 3.0),)
    assert {node.name: (node.network_gbps, node.rack) for node in known.nodes} == {
        "a": (2.5, None),
        "b/S1": (10.0, "r1"),
        "many-0": (25, None),
        "many-1": (25, "r2"),
        "many-2": (25, None),
        "b": (10.0, "r1"),
    }
    with pytest.raises(BadInputError, match="names the machine 'gone', which the cluster does not have; it has a, "):
        network.check_names(known)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: [{name: a, cpus: 4}]", "line 1: the key 'cpus' is not known; known keys are name, network_gbps, rack"),
        ("nodes:\n- name: a\n- name: a", "line 3: the node name 'a' is taken by line 2"),
        ("links: {across_racks_gbps: 0}", "line 1: 'links.across_racks_gbps' is 0"),
        ("links: {within_rack_cost: 0.01}", "'within_rack_cost' is 0.01, less than 0.1"),
        ("links:\n  pairs:\n  - {between: [a, b], cost: 2}\n  - {between: [b, a], cost: 3}", "line 4: Contradictory"),
        ("links: {across_racks_cost: 4, pairs: [{between: [a, b], cost: 2}]}", "costs are of pairs or of racks"),
    ],
)
def test_a_network_file_that_cannot_be_meant(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "network.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError) as refused:
        read_network(path)
    assert said.lower() in str(refused.value).lower()
    assert str(refused.value).startswith(f"{path}, line ")
