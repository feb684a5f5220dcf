"""Recording of the graphs that torch.compile makes."""

from torch._dynamo.testing import AotEagerAndRecordGraphs


class Recorded(AotEagerAndRecordGraphs):
    """Backend of torch.compile that records its graphs."""

    def packs(self) -> bool:
        """Return True if the graphs remove padding."""
        assert self.graphs
        return any(node.target == "nonzero" for g in self.graphs for node in g.graph.nodes)
