"""What torch.compile makes of a module."""

from torch._dynamo.testing import AotEagerAndRecordGraphs


class Recorded(AotEagerAndRecordGraphs):
    """A backend of torch.compile that keeps its graphs."""

    def packs(self) -> bool:
        """Whether they leave padding out."""
        assert self.graphs
        return any(node.target == "nonzero" for g in self.graphs for node in g.graph.nodes)
