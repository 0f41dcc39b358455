//! How tokens reach the ranks of their experts, and how results come back.
//!
//! - `gather`: expert-parallel ranks gather the tokens of all ranks, with their weights and
//!   choices. Each rank computes the choices of its experts and adds up the results of a token; a
//!   reduce-scatter adds these partial sums and returns them to the token's rank. Choices of all
//!   ranks share the rows of a rank. There are enough rows for the case that all tokens choose its
//!   experts, or a multiple of those of equally popular experts.
//! - `peer`: a rank writes each of its tokens to the ranks that have one of its experts, once per
//!   rank, into windows on their memory. These ranks compute as above, and write the sum of a
//!   token's results back, which the token's rank adds up. Rows have fixed places, so no counts are
//!   needed.
//! - `deepep`: the same, also between nodes. A token crosses the network once per node, to the rank
//!   with the same position within its node, which passes it on to the ranks of its experts. The
//!   host waits for the choices of other ranks, from which it counts the rows that will arrive.
//! - `padded`: a rank has a fixed number of places on each rank. An all-to-all sends one row per
//!   choice there, with its weight and the number of its expert; another one returns results to the
//!   same places, where each token adds up those of its choices.
//! - `all_to_all`: the same places, but ranks first exchange the numbers of used rows, the host
//!   reads these numbers, and only used rows are sent. (Jobs of PyTorch also allocate only these.)
//!
//! All sizes are static, and the buffers of collectives have the same size on all ranks.

use crate::config::{Dispatcher, Moe, Overflow};
use crate::graph::{Peers, ValueId};
use crate::ir::{
    AxisId, CollectiveKind, CountedRows, DeviceMesh, Indexing, ModelCollective, ModuleId, MoeStage,
    OpKind, PushedRows, RowLimit, SelectedRows, op,
};
use crate::models::build::Builder;

/// Calls of torchtitan's all-to-all dispatcher that sort choices by expert: `argsort`,
/// `floor_divide`, `histc` and conversions.
const SORT_CALLS: u8 = 6;
/// Its calls that find the row of each received choice from the counts of all ranks: sums,
/// `cumsum`, `arange`, `repeat_interleave` and `index`.
const PLACE_CALLS: u8 = 20;

/// The ranks that divide the experts of a layer.
pub(super) struct Dispatch {
    ranks: u64,
    /// Experts of one rank.
    experts: u64,
}

/// Tokens and their choices.
pub(super) struct Routed {
    /// `[tokens, hidden]`.
    pub(super) x: ValueId,
    /// Weights of the choices, `[tokens, k]`.
    pub(super) weights: ValueId,
    /// Experts of the choices, `[tokens, k]`.
    pub(super) ids: ValueId,
}

/// Tokens, or rows of single choices, on the rank of their experts.
pub(super) struct Sent {
    /// Tokens, with the indices of experts on this rank.
    pub(super) routed: Routed,
    /// Rows that experts get.
    pub(super) rows: u64,
    /// How many of them the busiest rank is expected to use, if not all.
    pub(super) used: Option<u64>,
    /// Rows that choices take, if there may be more of these.
    pub(super) limit: Option<RowLimit>,
    /// Framework calls that sort received rows by expert.
    pub(super) calls: u8,
    back: Back,
}

/// Choices with a place on the rank of their expert each.
pub(super) struct Placed {
    /// Places on all ranks.
    pub(super) rows: u64,
    /// How many of them the busiest rank is expected to use.
    pub(super) used: u64,
    /// The expert of each place, `[rows, 1]`.
    ids: ValueId,
    /// The place of each choice, `[tokens, k]`.
    pub(super) position: ValueId,
    /// Choices of each expert, `[ranks, experts]`, if the host reads them.
    counts: Option<ValueId>,
    /// Framework calls that sort received rows by expert.
    pub(super) calls: u8,
}

/// The numbers of rows that each rank sends and receives.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    of: CountedRows,
    /// Choices of this rank's tokens, by rank and expert, `[ranks, experts]`.
    sent: ValueId,
    /// Choices of all ranks, by rank and this rank's experts, `[ranks, experts]`.
    received: ValueId,
}

impl Counts {
    /// Returns the counts of rows that return.
    const fn back(self) -> Self {
        Self {
            sent: self.received,
            received: self.sent,
            ..self
        }
    }
}

/// Rows of choices on the rank of their expert.
pub(super) struct Got {
    /// The numbers of rows, if the host has read them.
    pub(super) counts: Option<Counts>,
    /// Experts of the rows, by their indices on this rank.
    pub(super) ids: ValueId,
    /// The weights of the choices, if these travel.
    weights: Option<ValueId>,
    pub(super) x: ValueId,
}

/// The way of results.
enum Back {
    /// Each rank has all experts.
    None,
    /// Partial sums are added up.
    Sums,
    /// Partial sums are pushed back and added up.
    Peers(Peers),
    /// Rows return to their places. `position`, `[tokens, k]`, is the place of each choice.
    Places {
        position: ValueId,
        counts: Option<Counts>,
    },
}

/// Returns the number of the layer that a module belongs to.
pub(super) fn layer_number(b: &Builder<'_>, module: ModuleId) -> Option<u32> {
    let path = &b.tree.modules[module.index()].path;
    path.split('.').find_map(|part| part.parse().ok())
}

impl Dispatch {
    pub(super) fn new(mesh: &DeviceMesh, experts: u64) -> Self {
        let ranks = u64::from(mesh.size(AxisId::EP));
        Self {
            ranks,
            experts: experts / ranks,
        }
    }

    /// Returns the distribution in which each rank has all experts.
    pub(super) const fn none(experts: u64) -> Self {
        Self { ranks: 1, experts }
    }

    /// Returns whether ranks exchange tokens.
    pub(super) const fn exchanges(&self) -> bool {
        self.ranks > 1
    }

    /// Runs `f`, which sorts rows by the experts of this rank. Where ranks exchange tokens, it does
    /// so behind the exchange, and is no part of its preparation.
    pub(super) fn locally<'s, T>(
        &self,
        b: &mut Builder<'s>,
        f: impl FnOnce(&mut Builder<'s>) -> T,
    ) -> T {
        match self.exchanges() {
            true => f(b),
            false => b.in_stage(MoeStage::Preprocess, f),
        }
    }

    /// Returns the number of experts of this rank.
    pub(super) const fn experts(&self) -> u64 {
        self.experts
    }

    /// Sends tokens to the ranks of their experts.
    pub(super) fn send(&self, b: &mut Builder<'_>, layer: ModuleId, of: Routed) -> Sent {
        let &[tokens, k] = &b.g.value(of.ids).shape[..] else {
            unreachable!("routers choose k experts for each token");
        };
        let s = b.s;
        let Some(moe) = &s.moe else {
            return Sent {
                routed: of,
                rows: tokens * k,
                used: None,
                limit: None,
                calls: 1,
                back: Back::None,
            };
        };
        let number = layer_number(b, layer);
        let used = moe.used(number, tokens * k);
        match moe.dispatcher {
            Dispatcher::Gather => self.gather(b, of, moe, [tokens, k], used),
            Dispatcher::Peer | Dispatcher::Deepep => {
                let all = self.ranks * tokens;
                let reach = moe.reach.as_ref().map_or(1.0, |r| r.of(number));
                let pushed = PushedRows {
                    experts: self.experts,
                    rows: all,
                    expected: (reach * all as f64).round() as u64,
                    over_network: (moe.node_reach.as_ref()).map_or(0, |r| r.rows(number, tokens)),
                };
                self.push(b, of, moe, [tokens, k], (used, pushed))
            }
            Dispatcher::AllToAll | Dispatcher::Padded => self.send_choices(b, layer, of),
        }
    }

    /// Sends ids to the ranks of all experts, as indices on these ranks. Returns the ids that this
    /// rank sends and receives, both `[ranks * tokens, k]`.
    fn exchange_ids(&self, b: &mut Builder<'_>, ids: ValueId, shape: [u64; 2]) -> [ValueId; 2] {
        let kind = OpKind::LocalExperts(op::LocalExperts {
            ranks: self.ranks,
            experts: self.experts,
        });
        let sent = b.in_stage(MoeStage::Preprocess, |b| {
            b.compute(kind, &[ids], &[&shape])[0]
        });
        [sent, self.exchange(b, CollectiveKind::AllToAll, sent)]
    }

    /// Pushes each token to the ranks of its experts.
    fn push(
        &self,
        b: &mut Builder<'_>,
        of: Routed,
        moe: &Moe,
        [tokens, k]: [u64; 2],
        (used, pushed): (u64, PushedRows),
    ) -> Sent {
        let (ranks, experts) = (self.ranks, self.experts);
        let [sent, got] = self.exchange_ids(b, of.ids, [pushed.rows, k]);
        let weights = self.exchange(b, CollectiveKind::AllGather, of.weights);
        let (rows, limit) = self.shared_rows(moe, [tokens, k]);
        let kind = OpKind::PushedRows(op::PushedRows { ranks, experts });
        let position = b.in_stage(MoeStage::Preprocess, |b| {
            b.compute(kind, &[sent], &[&[tokens, ranks]])[0]
        });
        let peers = Peers {
            axis: AxisId::EP,
            pushed,
            sent,
            got,
            position,
        };
        let x = match moe.dispatcher.host_reads() {
            true => b.g.host_sizes(of.x, got),
            false => of.x,
        };
        let x = b.g.peer_push(peers, x);
        for v in [of.ids, of.weights] {
            b.g.release(v);
        }
        Sent {
            routed: Routed {
                x,
                weights,
                ids: got,
            },
            rows,
            used: Some(rows.min(used)),
            limit,
            calls: 1,
            back: Back::Peers(peers),
        }
    }

    /// Returns the rows that choices of all ranks share, and the limit if there may be more of
    /// them.
    fn shared_rows(&self, moe: &Moe, [tokens, k]: [u64; 2]) -> (u64, Option<RowLimit>) {
        let rows = moe.rows([tokens, k], [self.ranks, self.experts]);
        let limited = rows < Moe::most_slots([self.ranks * tokens, k], self.experts);
        let limit = limited.then_some(RowLimit {
            rows,
            balanced: tokens * k,
            drop: moe.on_overflow == Overflow::Drop,
        });
        (rows, limit)
    }

    /// Gathers the tokens of all ranks, with their weights and the numbers that this rank's experts
    /// have here.
    fn gather(
        &self,
        b: &mut Builder<'_>,
        of: Routed,
        moe: &Moe,
        [tokens, k]: [u64; 2],
        used: u64,
    ) -> Sent {
        let all = self.ranks * tokens;
        let [sent, ids] = self.exchange_ids(b, of.ids, [all, k]);
        let weights = self.exchange(b, CollectiveKind::AllGather, of.weights);
        let x = self.exchange(b, CollectiveKind::AllGather, of.x);
        for v in [of.ids, of.weights, sent] {
            b.g.release(v);
        }
        let (rows, limit) = self.shared_rows(moe, [tokens, k]);
        Sent {
            routed: Routed { x, weights, ids },
            rows,
            used: Some(rows.min(used)),
            limit,
            calls: 1,
            back: Back::Sums,
        }
    }

    /// Sorts choices by expert; returns where the rows of each expert start, `[experts + 1]`, and
    /// the row of each choice.
    pub(super) fn sort(&self, b: &mut Builder<'_>, ids: ValueId, calls: u8) -> [ValueId; 2] {
        self.sort_within(b, ids, calls, None)
    }

    /// Does the same with the choices that find a row.
    pub(super) fn sort_within(
        &self,
        b: &mut Builder<'_>,
        ids: ValueId,
        calls: u8,
        limit: Option<RowLimit>,
    ) -> [ValueId; 2] {
        let shape = b.g.value(ids).shape.clone();
        let kind = OpKind::SortExperts(op::SortExperts {
            experts: self.experts,
            limit,
        });
        let sorted = b.compute(kind, &[ids], &[&[self.experts + 1], &shape]);
        b.g.dispatches(calls);
        [sorted[0], sorted[1]]
    }

    /// Gives each choice a place on the rank of its expert.
    pub(super) fn place(&self, b: &mut Builder<'_>, layer: ModuleId, ids: ValueId) -> Placed {
        let &[tokens, k] = &b.g.value(ids).shape[..] else {
            unreachable!("routers choose k experts for each token");
        };
        let (ranks, experts) = (self.ranks, self.experts);
        let moe = b.s.moe.as_ref();
        let used = moe.map(|moe| moe.used(layer_number(b, layer), tokens * k));
        let slots = moe.map_or(tokens * k, |moe| moe.slots([tokens, k], [ranks, experts]));
        let counted = moe.is_some_and(|moe| moe.dispatcher == Dispatcher::AllToAll);
        let rows = ranks * slots;
        let kind = OpKind::DispatchExperts(op::DispatchExperts {
            ranks,
            experts,
            slots,
            drop: moe.is_some_and(|moe| moe.on_overflow == Overflow::Drop),
        });
        let shapes: [&[u64]; 3] = [&[rows, 1], &[tokens, k], &[ranks, experts]];
        let placed = b.compute(kind, &[ids], &shapes);
        b.g.dispatches(SORT_CALLS);
        Placed {
            rows,
            used: used.map_or(rows, |used| rows.min(used)),
            ids: placed[0],
            position: placed[1],
            counts: counted.then_some(placed[2]),
            calls: PLACE_CALLS,
        }
    }

    /// Exchanges the rows of choices, with the numbers of their experts and, if they travel, their
    /// weights.
    pub(super) fn exchange_rows(
        &self,
        b: &mut Builder<'_>,
        of: &Placed,
        x: ValueId,
        weights: Option<ValueId>,
    ) -> Got {
        let mut sent = x;
        let mut counts = None;
        if let Some(of_choices) = of.counts {
            let received = self.all_to_all(b, of_choices, None);
            sent = b.g.host_sizes(sent, received);
            b.g.release(received);
            counts = (self.ranks > 1).then_some(Counts {
                of: CountedRows {
                    rows: of.rows,
                    expected: of.used,
                },
                sent: of_choices,
                received,
            });
        }
        let got = Got {
            counts,
            // All of them: an empty place has the number -1.
            ids: self.all_to_all(b, of.ids, None),
            weights: weights.map(|weights| self.all_to_all(b, weights, counts)),
            x: self.all_to_all(b, sent, counts),
        };
        if self.ranks > 1 {
            for v in [of.ids, sent].into_iter().chain(of.counts).chain(weights) {
                b.g.release(v);
            }
        }
        got
    }

    /// Returns rows to their places. `counts` are those of the exchange that brought them.
    pub(super) fn return_rows(
        &self,
        b: &mut Builder<'_>,
        rows: ValueId,
        counts: Option<Counts>,
    ) -> ValueId {
        let back = self.all_to_all(b, rows, counts.map(Counts::back));
        if back != rows {
            b.g.release(rows);
        }
        back
    }

    /// Exchanges rows between the ranks of all experts, if there are several: those that were
    /// counted, or all places.
    fn all_to_all(&self, b: &mut Builder<'_>, v: ValueId, counts: Option<Counts>) -> ValueId {
        match counts {
            _ if self.ranks == 1 => v,
            None => self.exchange(b, CollectiveKind::AllToAll, v),
            Some(counts) => {
                let collective = ModelCollective {
                    rows: Some(SelectedRows::Counted(counts.of)),
                    ..ModelCollective::new(CollectiveKind::AllToAll, AxisId::EP)
                };
                b.g.exchange_counted(collective, v, [counts.sent, counts.received])
            }
        }
    }

    /// Sends a row for each choice that has a place.
    fn send_choices(&self, b: &mut Builder<'_>, layer: ModuleId, of: Routed) -> Sent {
        let &[tokens, k] = &b.g.value(of.ids).shape[..] else {
            unreachable!("routers choose k experts for each token");
        };
        let (placed, sent, weights) = b.in_stage(MoeStage::Preprocess, |b| {
            let placed = self.place(b, layer, of.ids);
            let (rows, position) = (placed.rows, placed.position);
            let sent = b.permute(Indexing::Own, [of.x, position], rows);
            // Each number in the place of its row.
            let each = b.g.reshape(of.weights, &[tokens * k, 1]);
            let place = b.g.reshape(position, &[tokens * k, 1]);
            let weights = b.permute(Indexing::Own, [each, place], rows);
            (placed, sent, weights)
        });
        let (rows, position) = (placed.rows, placed.position);
        let got = self.exchange_rows(b, &placed, sent, Some(weights));
        for v in [of.ids, of.weights] {
            b.g.release(v);
        }
        Sent {
            routed: Routed {
                ids: got.ids,
                weights: got.weights.unwrap_or(weights),
                x: got.x,
            },
            rows,
            used: Some(placed.used),
            limit: None,
            calls: placed.calls,
            back: Back::Places {
                position,
                counts: got.counts,
            },
        }
    }

    /// Returns the results of each token of this rank, from rows of `sent`: partial sums are added
    /// up in the order of ranks, single choices in the order of choices.
    pub(super) fn combine(&self, b: &mut Builder<'_>, sent: &Sent, y: ValueId) -> ValueId {
        let (back, position) = match sent.back {
            Back::None => return y,
            Back::Peers(peers) => {
                let sum = b.g.peer_sum(peers, y);
                for v in [y, peers.sent, peers.got, peers.position] {
                    b.g.release(v);
                }
                return sum;
            }
            Back::Sums => {
                let sum = self.exchange(b, CollectiveKind::ReduceScatter, y);
                b.g.release(y);
                return sum;
            }
            Back::Places { position, counts } => (self.return_rows(b, y, counts), position),
        };
        let tokens = b.g.value(position).shape[0];
        let sum = b.unpermute(Indexing::Own, [back, position], tokens);
        b.g.release(back);
        b.g.release(position);
        sum
    }

    fn exchange(&self, b: &mut Builder<'_>, kind: CollectiveKind, v: ValueId) -> ValueId {
        let mut shape = b.g.value(v).shape.clone();
        match kind {
            CollectiveKind::AllGather => shape[0] *= self.ranks,
            CollectiveKind::ReduceScatter => shape[0] /= self.ranks,
            _ => {}
        }
        let axis = AxisId::EP;
        b.g.collective(ModelCollective::new(kind, axis), v, &shape)
    }
}
