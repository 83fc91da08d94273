"""What each differing row of a rank's step can have inherited from, within the rank: by what depends on what.

Where a fingerprint shows the way, that is the only one. Elsewhere a row can have inherited from everything before
it that its kind of row reads: a Node from the Nodes before it in its pass, and, for what it saved, from the forward
calls and parameters of its module. So a row that nothing feeds is an origin, however late it comes; a fault behind
another one is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.origins import inheriting_backward as backward
from gradtrace_analyzer.diff.origins import inheriting_forward as forward
from gradtrace_analyzer.diff.origins.rank_rows import RankRows, way_of

# How the rows of each link table inherit: adds one of a rank's to the graph, and returns its vertex. Rows of a table
# that is not here inherit from anything before them.
INHERITING: Mapping[str, Callable[[RankRows, Difference], int]] = {
    "parameters": forward.parameter,
    "inputs": forward.given,
    "module_calls": forward.call,
    "backward_passes": forward.backward_pass,
    "node_events": backward.node,
    "stage_events": backward.action,
    "buckets": backward.bucket,
    "gradients": backward.gradient,
    "optimizer_groups": forward.group,
}


class RankChain(RankRows):
    """Adds the rows of one rank to a graph, in program order, each with what feeds it inside the rank."""

    def add(self, d: Difference) -> int:
        """Add the next row of the rank, in program order, and return its vertex in the graph."""
        before = self.before()
        v = self.carried.get(id(d))
        if v is None:
            is_lone = d.only_in is not None and d.link != "carried_gradient"
            inheriting = INHERITING.get(d.table, forward.whatever)
            v = self._lone(d) if is_lone else inheriting(self, d)
        if self.known.is_filtered and not self.graph.feeders[v]:
            self.graph.feeders[v] |= set(before)
        self.join(v, "any")
        self.join_place(v, d, "in action")
        return v

    def _lone(self, d: Difference) -> int:
        """Add a row that one side alone has: it may come from anything before, and anything after from it."""
        v = self.graph.add(d, self.before())
        self.join(v, "structure")
        if d.table in ("module_calls", "node_events"):
            self.join_module(v, d)
        if d.table == "module_calls":
            self.join(v, "lone calls", d.key["microbatch"], d.key["root"])
        if d.table == "gradients":
            self.join(v, "gradient", d.key["root"], d.key["parameter_fqn"])
            self.join(v, "gradients")
        return v

    def look_ahead(self, d: Difference) -> None:
        """Take note of a row whose place in the order is not that of its cause; to be called before `add`."""
        if d.table == "node_events" and d.key["parameter_fqn"] is not None and d.only_in is None:
            place = (d.key["backward_index"], d.key["root"], d.key["parameter_fqn"])
            self.accumulating[place] = d
        # What a step begins with comes before all of it, wherever its row stands.
        if d.link == "carried_gradient":
            self.carried[id(d)] = backward.gradient(self, d)
        if d.table != "stage_events":
            return
        # What an action received comes before all that ran in it.
        if self.is_apart(d.reads) and d.only_in is None:
            v = self.graph.add(d)
            self.received.append((d, v))
            self.join(v, "received", d.key["stage_index"], d.key["microbatch"], way_of(d))
            self.join(v, "received", way_of(d))
