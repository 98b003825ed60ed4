"""Which moves of the membership protocol's model need not be tried in every order.

Reduction. With `reduced`, moves that commute with all others and that no other process sees are made at once:

- Frames to the coordinator are delivered at once, a death is noticed at once. A report or confirmation in flight when
  its change is restarted is ignored, as if it had not been sent. A death noticed late equals one that came late.
- Once a change has started no worker continues to run. A running worker depends only on how far the others have come,
  never on the frames that they received, so it could have made any later move before the start.
- Aborts are taken in the order of ranks (a report has the same content whenever it is sent), commit and gather at once.
- An aborted worker only remembers whether it had all of its gradients.
- A worker confirms at once as long as another one has not taken the record: nobody acts on any confirmation but the
  last.
- Where no fault can come any more and nobody asks for a change, what is left commutes: one order of it is followed.
  During a change new workers may still come, since they enter with the next one whenever they come.

Deaths stay possible before, between and after all other moves. Larger worlds are walked at random without `reduced`;
on small ones both ways are explored and compared.
"""

from __future__ import annotations

from operator import itemgetter

from tests.support.protocol_workers import WorkerModel
from tests.support.protocol_world import CONFIRMED, RESOLVED, World


class ReducedModel(WorkerModel):
    """What `reduced` asks."""

    def _confirm_now(self, world: World, rank: int) -> World:
        return self._put(world, rank, self._confirm(world, rank, world.workers[rank]))

    def _is_confirmed_unseen(self, world: World, rank: int) -> bool:
        """Whether a worker may confirm, and nothing follows: another one has not taken the record."""
        proposed = world.workers[rank].proposed
        others = [world.workers[other] for other in self.record(proposed).members]
        is_last = all(other.mode in (RESOLVED, CONFIRMED) and other.proposed == proposed for other in others)
        return not (is_last or world.suspicions) and self._can_move(world, rank)

    def _goes_straight_on(self, world: World) -> bool:
        """Whether no fault can come any more and nobody asks for a change."""
        faults = (world.deaths, world.suspicions, world.drains, world.false_deaths, world.host_deaths, world.takeovers)
        if any(faults) or world.relay_stops or world.unseen or world.silent:
            return False
        workers = [worker for worker in world.workers if worker.alive]
        if any(worker.evicted or ("build_part" in map(itemgetter(0), worker.inbox)) for worker in workers):
            return False
        protocol = self.protocol(world)
        if protocol.pending is not None:
            return True  # whether a new worker comes before or after a frame, it enters with the next change
        asks = any(worker.draining or worker.asked == protocol._generation or worker.inbox for worker in workers)
        return not (asks or world.joins or world.moves)
