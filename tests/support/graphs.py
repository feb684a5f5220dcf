"""Backend that records the graphs which torch.compile generates."""

from torch._dynamo.testing import AotEagerAndRecordGraphs


class Recorded(AotEagerAndRecordGraphs):
    """torch.compile backend that records graphs and runs them with AOT autograd, uncompiled."""

    def packs(self) -> bool:
        """Return True if a graph removes padding."""
        assert self.graphs
        return any(node.target == "nonzero" for g in self.graphs for node in g.graph.nodes)
