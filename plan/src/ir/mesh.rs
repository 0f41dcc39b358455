//! The device mesh: ranks as points on named axes, and the placement of data on them.
//!
//! An axis has a size and a stride: rank `r` has coordinate `r / stride % size` on it. All axes are
//! rows of one table ([`AxisId::ALL`] lists their ids). Accesses, communicators, placements and
//! collectives of the model refer to an axis by its id.

use super::AxisId;
use serde::ser::{SerializeStruct, SerializeTuple};
use serde::{Serialize, Serializer};

/// What the ranks along an axis have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AxisRole {
    /// Each takes different samples, so gradients and losses are averaged over the axis.
    Data,
    /// All take the same samples, and each does a part of the work for them.
    Model,
    /// They are adjacent ranks of another axis, and this axis is a part of that one.
    PartOf(AxisId),
    /// They are ranks of another axis, one from each such part of it, with the same coordinate on
    /// the part.
    Across(AxisId),
}

/// Facts about an axis that do not depend on its size.
struct AxisSpec {
    /// Name of its key in `[mesh]`.
    name: &'static str,
    /// Name in program text and messages.
    label: &'static str,
    role: AxisRole,
}

/// All axes, in the order of their ids. Axes of role `Model` are nested within those of role
/// `Data`, so that ranks that exchange activations are adjacent. Within a role, earlier axes are
/// nested within later ones.
const AXES: [AxisSpec; 6] = [
    AxisSpec {
        name: "dp_shard",
        label: "shard",
        role: AxisRole::Data,
    },
    AxisSpec {
        name: "dp_outer",
        label: "outer",
        role: AxisRole::Data,
    },
    AxisSpec {
        name: "sub_shard",
        label: "sub-shard",
        role: AxisRole::PartOf(AxisId::DP_SHARD),
    },
    AxisSpec {
        name: "tp",
        label: "tp",
        role: AxisRole::Model,
    },
    AxisSpec {
        name: "ep",
        label: "ep",
        role: AxisRole::PartOf(AxisId::DP_SHARD),
    },
    AxisSpec {
        name: "edp",
        label: "edp",
        role: AxisRole::Across(AxisId::EP),
    },
];

impl AxisId {
    /// Inner data-parallel axis, over which parameters are sharded.
    pub const DP_SHARD: Self = Self(0);
    /// Outer data-parallel axis, which replicates or shards the optimizer.
    pub const DP_OUTER: Self = Self(1);
    /// Part of [`AxisId::DP_SHARD`] that keeps a whole copy between forward and backward (integer
    /// `reshard_after_forward`).
    pub const SUB_SHARD: Self = Self(2);
    /// Tensor parallelism: layers are divided, and collectives of the model graph exchange
    /// activations.
    pub const TP: Self = Self(3);
    /// Expert parallelism: adjacent ranks of [`AxisId::DP_SHARD`] divide the experts of a layer,
    /// and collectives of the model graph exchange tokens.
    pub const EP: Self = Self(4);
    /// Ranks of [`AxisId::DP_SHARD`] that have the same experts, which are sharded over them. Its
    /// size follows from the other two axes.
    pub const EDP: Self = Self(5);
    /// All axes.
    pub const ALL: [Self; AXES.len()] = {
        let mut all = [Self(0); AXES.len()];
        let mut i = 0;
        while i < AXES.len() {
            all[i] = Self(i as u8);
            i += 1;
        }
        all
    };

    /// Returns the axis's name, that of its key in `[mesh]`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        AXES[self.index()].name
    }

    /// Returns the axis's name in program text and messages.
    #[must_use]
    pub const fn label(self) -> &'static str {
        AXES[self.index()].label
    }

    /// Returns what the ranks along the axis share.
    #[must_use]
    pub const fn role(self) -> AxisRole {
        AXES[self.index()].role
    }

    /// Returns the axis that this one is a part of, or itself.
    #[must_use]
    pub const fn whole(self) -> Self {
        match self.role() {
            AxisRole::PartOf(axis) => axis,
            AxisRole::Across(part) => part.whole(),
            AxisRole::Data | AxisRole::Model => self,
        }
    }
}

/// A set of axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AxisSet(u8);

impl AxisSet {
    /// No axis.
    pub const EMPTY: Self = Self(0);
    /// The data-parallel axes, over which gradients and losses are averaged.
    pub const DATA: Self = {
        let (mut set, mut i) = (Self::EMPTY, 0);
        while i < AXES.len() {
            if matches!(AXES[i].role, AxisRole::Data) {
                set = set.with(AxisId(i as u8));
            }
            i += 1;
        }
        set
    };
    /// The axes whose ranks take the same samples.
    pub const MODEL: Self = {
        let (mut set, mut i) = (Self::EMPTY, 0);
        while i < AXES.len() {
            if matches!(AXES[i].role, AxisRole::Model) {
                set = set.with(AxisId(i as u8));
            }
            i += 1;
        }
        set
    };

    /// Returns the set of one axis.
    #[must_use]
    pub const fn of(axis: AxisId) -> Self {
        Self(1 << axis.0)
    }

    /// Returns the set with another axis.
    #[must_use]
    pub const fn with(self, axis: AxisId) -> Self {
        self.union(Self::of(axis))
    }

    /// Returns the axes of either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the axes that are not in another set.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns whether all axes of another set are among these.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether the sets share an axis.
    #[must_use]
    pub(crate) const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns whether there is no axis.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the axes, in the order of their ids.
    pub fn iter(self) -> impl Iterator<Item = AxisId> {
        AxisId::ALL
            .into_iter()
            .filter(move |a| self.intersects(Self::of(*a)))
    }

    /// Returns the single axis of the set; `None` if there is not exactly one.
    #[must_use]
    pub fn single(self) -> Option<AxisId> {
        let mut axes = self.iter();
        axes.next().filter(|_| axes.next().is_none())
    }

    /// Returns the whole axes that these axes are, or are parts of.
    #[must_use]
    pub fn whole(self) -> Self {
        self.iter()
            .fold(Self::EMPTY, |set, axis| set.with(axis.whole()))
    }

    /// Returns the set's name in program text and messages: the name of an axis, or `world`.
    #[must_use]
    pub fn label(self) -> String {
        match self.single() {
            Some(axis) => axis.label().to_owned(),
            None if self == Self::DATA => "world".to_owned(),
            None => {
                let labels: Vec<_> = self.iter().map(AxisId::label).collect();
                labels.join(" x ")
            }
        }
    }
}

/// Writes the number that stands for the set in a digest. Programs keep their digests from before
/// other sets than these four were possible.
impl Serialize for AxisSet {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u16(match self.single() {
            Some(AxisId::DP_SHARD) => 0,
            Some(AxisId::DP_OUTER) => 1,
            Some(AxisId::SUB_SHARD) => 2,
            None if *self == Self::DATA => 3,
            _ => 0x100 | u16::from(self.0),
        })
    }
}

/// An axis of one mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshAxis {
    /// Name.
    pub name: &'static str,
    /// Ranks along the axis.
    pub size: u32,
    /// Distance between adjacent ranks along it.
    pub stride: u32,
}

/// The ranks of a program, on all axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    /// By [`AxisId`].
    axes: [MeshAxis; AXES.len()],
}

impl DeviceMesh {
    /// Creates a mesh from the sizes of its axes. Other axes have one rank.
    #[must_use]
    pub fn new(sizes: &[(AxisId, u32)]) -> Self {
        let mut axes = AxisId::ALL.map(|axis| MeshAxis {
            name: axis.name(),
            size: 1,
            stride: 1,
        });
        for &(axis, size) in sizes {
            axes[axis.index()].size = size;
        }
        let mut stride = 1;
        for role in [AxisRole::Model, AxisRole::Data] {
            for axis in AxisId::ALL.into_iter().filter(|a| a.role() == role) {
                axes[axis.index()].stride = stride;
                stride *= axes[axis.index()].size;
            }
        }
        for axis in AxisId::ALL {
            let whole = axes[axis.whole().index()];
            let of = &mut axes[axis.index()];
            of.stride = whole.stride;
            if let AxisRole::Across(part) = axis.role() {
                let parts = axes[part.index()].size;
                let of = &mut axes[axis.index()];
                (of.size, of.stride) = (whole.size / parts, whole.stride * parts);
            }
        }
        Self { axes }
    }

    /// Returns this mesh with a different size of an axis.
    #[must_use]
    pub fn with(&self, axis: AxisId, size: u32) -> Self {
        let mut sizes = AxisId::ALL.map(|a| (a, self.size(a)));
        sizes[axis.index()].1 = size;
        Self::new(&sizes)
    }

    /// Creates a mesh with the two data-parallel axes.
    #[must_use]
    pub fn data_parallel(dp_shard: u32, dp_outer: u32) -> Self {
        Self::new(&[(AxisId::DP_SHARD, dp_shard), (AxisId::DP_OUTER, dp_outer)])
    }

    /// Returns an axis.
    #[must_use]
    pub const fn axis(&self, axis: AxisId) -> &MeshAxis {
        &self.axes[axis.index()]
    }

    /// Returns the ranks along an axis.
    #[must_use]
    pub const fn size(&self, axis: AxisId) -> u32 {
        self.axis(axis).size
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.product(|role| matches!(role, AxisRole::Data | AxisRole::Model))
    }

    /// Returns the number of ranks that take different samples.
    #[must_use]
    pub fn data_ranks(&self) -> u32 {
        self.product(|role| role == AxisRole::Data)
    }

    fn product(&self, of: impl Fn(AxisRole) -> bool) -> u32 {
        let axes = AxisId::ALL.into_iter().filter(|a| of(a.role()));
        axes.map(|a| self.size(a)).product()
    }

    /// Returns a rank's coordinate on an axis.
    #[must_use]
    pub fn coordinate(&self, axis: AxisId, rank: u32) -> u32 {
        let MeshAxis { size, stride, .. } = *self.axis(axis);
        RankGroup { size, stride }.position(rank)
    }

    /// Returns a rank's index among those that take different samples. Ranks that differ only on
    /// axes of role `Model` have the same index.
    #[must_use]
    pub fn data_rank(&self, rank: u32) -> u32 {
        let (mut number, mut stride) = (0, 1);
        for axis in AxisSet::DATA.iter() {
            number += self.coordinate(axis, rank) * stride;
            stride *= self.size(axis);
        }
        number
    }

    /// Returns whether a rank is the first of those that take the same samples.
    #[must_use]
    pub fn leads_samples(&self, rank: u32) -> bool {
        let mut axes = AxisSet::MODEL.iter();
        axes.all(|a| self.coordinate(a, rank) == 0)
    }

    /// Returns the sizes of axes that divide the model, such as ` x 2 tp`; empty if there are none.
    #[must_use]
    pub fn model_axes_text(&self) -> String {
        let axes = AxisSet::MODEL.iter().filter(|a| self.size(*a) > 1);
        axes.map(|a| format!(" x {} {}", self.size(a), a.label()))
            .collect()
    }

    /// Returns the ranks that communicate over a set of axes; `None` if they are not evenly spaced.
    #[must_use]
    pub fn group(&self, over: AxisSet) -> Option<RankGroup> {
        let mut axes: Vec<&MeshAxis> = over.iter().map(|a| self.axis(a)).collect();
        axes.retain(|a| a.size != 1);
        axes.sort_by_key(|a| a.stride);
        let stride = axes.first().map_or(1, |a| a.stride);
        let mut size = 1;
        for axis in axes {
            if axis.stride != stride * size {
                return None;
            }
            size *= axis.size;
        }
        Some(RankGroup { size, stride })
    }
}

/// Writes the part of a mesh that digests contain: its ranks and its data-parallel axes, and other
/// axes only if they have more than one rank. Programs keep their digests from before there were
/// other axes. Parts of an axis are in the communicators that use them.
impl Serialize for DeviceMesh {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut out = to.serialize_struct("DeviceMesh", AXES.len() + 1)?;
        out.serialize_field("world", &self.world())?;
        for axis in AxisSet::DATA.iter() {
            out.serialize_field(axis.name(), &self.size(axis))?;
        }
        for axis in AxisId::ALL {
            if axis.role() == AxisRole::Model && self.size(axis) > 1 {
                out.serialize_field(axis.name(), &(axis, self.size(axis)))?;
            }
        }
        out.end()
    }
}

/// Ranks that communicate: every `stride`-th, `size` of them. All groups of a mesh have the same
/// form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct RankGroup {
    /// Ranks in a group.
    pub size: u32,
    /// Distance between adjacent members, in ranks.
    pub stride: u32,
}

impl RankGroup {
    /// Returns the ranks of the group that `rank` belongs to, ascending.
    pub fn members(self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        let (size, stride) = (self.size.max(1), self.stride.max(1));
        let first = rank / (size * stride) * (size * stride) + rank % stride;
        (0..size).map(move |i| first + i * stride)
    }

    /// Returns the position of `rank` within its group.
    #[must_use]
    pub fn position(self, rank: u32) -> u32 {
        rank / self.stride.max(1) % self.size.max(1)
    }

    /// Returns the maximum number of nodes with `gpus_per_node` ranks that one group spans.
    #[must_use]
    pub fn nodes(self, world: u32, gpus_per_node: u32) -> u32 {
        let (size, stride) = (self.size.max(1), self.stride.max(1));
        let per_node = gpus_per_node.max(1);
        let block = size.saturating_mul(stride);
        let of = |first: u32| {
            let nodes = (0..size).map(|i| (first + i * stride) / per_node);
            1 + nodes
                .clone()
                .zip(nodes.skip(1))
                .filter(|(a, b)| a != b)
                .count() as u32
        };
        let firsts = (0..world.max(1)).step_by(block as usize);
        let firsts = firsts.flat_map(|block| (0..stride).map(move |i| block + i));
        firsts.map(of).max().unwrap_or(1)
    }
}

/// Placement of data on an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Every rank has all of it.
    #[default]
    Replicate,
    /// Every rank has a partial sum of it.
    Partial,
    /// Every rank has a slice of the flat buffer.
    Flat,
    /// Every rank has a slice of this dimension.
    Shard(u8),
}

/// Placements by axis. The default is replicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placements([Placement; AXES.len()]);

/// Writes the placements on the first four axes, and on later axes up to the last one with a
/// placement. Programs keep their digests from before there were more axes.
impl Serialize for Placements {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let placed = self.0.iter().rposition(|p| *p != Placement::Replicate);
        let written = &self.0[..placed.map_or(0, |last| last + 1).max(4)];
        let mut out = to.serialize_tuple(written.len())?;
        written.iter().try_for_each(|p| out.serialize_element(p))?;
        out.end()
    }
}

impl Placements {
    /// Everything on every rank.
    pub const REPLICATED: Self = Self([Placement::Replicate; AXES.len()]);

    /// Returns these placements with another one on an axis.
    #[must_use]
    pub const fn with(mut self, axis: AxisId, placement: Placement) -> Self {
        self.0[axis.index()] = placement;
        self
    }

    /// Returns the placement on an axis.
    #[must_use]
    pub const fn on(self, axis: AxisId) -> Placement {
        self.0[axis.index()]
    }

    /// Returns the axes whose placement satisfies a condition.
    #[must_use]
    pub fn axes(self, placed: impl Fn(Placement) -> bool) -> AxisSet {
        let axes = AxisId::ALL.into_iter().filter(|a| placed(self.on(*a)));
        axes.fold(AxisSet::EMPTY, AxisSet::with)
    }

    /// Returns the axes along which every rank has a separate slice.
    #[must_use]
    pub fn divided(self) -> AxisSet {
        self.axes(|p| matches!(p, Placement::Flat | Placement::Shard(_)))
    }

    /// Returns whether every rank has all of it.
    #[must_use]
    pub(crate) fn replicated(&self) -> bool {
        *self == Self::REPLICATED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_lie_on_their_axes() {
        let mesh = DeviceMesh::new(&[
            (AxisId::DP_SHARD, 4),
            (AxisId::DP_OUTER, 2),
            (AxisId::SUB_SHARD, 2),
        ]);
        assert_eq!((mesh.world(), mesh.data_ranks()), (8, 8));
        let on = |axis| mesh.coordinate(axis, 6);
        assert_eq!(on(AxisId::DP_OUTER), 1);
        assert_eq!(on(AxisId::DP_SHARD), 2);
        assert_eq!(on(AxisId::SUB_SHARD), 0);
        assert_eq!(
            (0..8).map(|r| mesh.data_rank(r)).collect::<Vec<_>>(),
            (0..8).collect::<Vec<_>>()
        );
        let of = |axes, rank| -> Vec<u32> { mesh.group(axes).unwrap().members(rank).collect() };
        assert_eq!(of(AxisSet::of(AxisId::DP_SHARD), 6), [4, 5, 6, 7]);
        assert_eq!(of(AxisSet::of(AxisId::DP_OUTER), 6), [2, 6]);
        assert_eq!(of(AxisSet::of(AxisId::SUB_SHARD), 6), [6, 7]);
        assert_eq!(of(AxisSet::DATA, 6), (0..8).collect::<Vec<_>>());
        for axis in AxisId::ALL {
            let group = mesh.group(AxisSet::of(axis)).unwrap();
            for rank in 0..8 {
                let members: Vec<u32> = group.members(rank).collect();
                assert_eq!(members[group.position(rank) as usize], rank);
            }
        }
    }

    #[test]
    fn groups_over_several_axes_are_evenly_spaced_or_none() {
        let mesh = DeviceMesh::data_parallel(1, 3);
        let both = mesh.group(AxisSet::DATA).unwrap();
        assert_eq!(both, RankGroup { size: 3, stride: 1 });
        // Adjacent ranks on the part, then every fourth rank. The ranks between them are in other
        // groups.
        let mesh = DeviceMesh::new(&[
            (AxisId::DP_SHARD, 4),
            (AxisId::DP_OUTER, 2),
            (AxisId::SUB_SHARD, 2),
        ]);
        let apart = AxisSet::of(AxisId::SUB_SHARD).with(AxisId::DP_OUTER);
        assert_eq!(mesh.group(apart), None);
    }

    /// Two parts of four ranks. Experts are divided within a part and sharded across the parts.
    #[test]
    fn expert_parallel_ranks_are_adjacent() {
        let mesh = DeviceMesh::new(&[
            (AxisId::TP, 2),
            (AxisId::DP_SHARD, 8),
            (AxisId::DP_OUTER, 2),
            (AxisId::EP, 4),
        ]);
        assert_eq!((mesh.world(), mesh.data_ranks()), (32, 16));
        let of = |axis, rank| -> Vec<u32> {
            let group = mesh.group(AxisSet::of(axis)).unwrap();
            group.members(rank).collect()
        };
        assert_eq!(of(AxisId::EP, 5), [1, 3, 5, 7]);
        assert_eq!(of(AxisId::EDP, 5), [5, 13]);
        assert_eq!(AxisId::EDP.whole(), AxisId::DP_SHARD);
        for rank in 0..32 {
            let on = |axis| mesh.coordinate(axis, rank);
            assert_eq!(on(AxisId::DP_SHARD), on(AxisId::EDP) * 4 + on(AxisId::EP));
        }
        let both = AxisSet::of(AxisId::EP).with(AxisId::EDP);
        assert_eq!(mesh.group(both), mesh.group(AxisSet::of(AxisId::DP_SHARD)));
        let without = mesh.with(AxisId::EP, 1);
        assert_eq!(without.size(AxisId::EDP), 8);
    }

    #[test]
    fn sets_of_axes() {
        let shard = AxisSet::of(AxisId::DP_SHARD);
        assert_eq!(AxisSet::DATA, shard.with(AxisId::DP_OUTER));
        assert_eq!(shard.single(), Some(AxisId::DP_SHARD));
        assert_eq!(AxisSet::DATA.single(), None);
        assert_eq!(AxisSet::of(AxisId::SUB_SHARD).whole(), shard);
        assert_eq!(AxisSet::DATA.label(), "world");
        assert_eq!(AxisSet::of(AxisId::SUB_SHARD).label(), "sub-shard");
    }

    #[test]
    fn nodes_of_the_widest_group() {
        let nodes =
            |size, stride, world, per_node| RankGroup { size, stride }.nodes(world, per_node);
        // Four groups of 6 on three nodes of 8: ranks 6 to 11 span two.
        assert_eq!(nodes(6, 1, 24, 8), 2);
        assert_eq!(nodes(6, 1, 6, 8), 1);
        assert_eq!(nodes(8, 1, 24, 8), 1);
        assert_eq!(nodes(4, 1, 24, 8), 1);
        assert_eq!(nodes(16, 1, 32, 8), 2);
        assert_eq!(nodes(12, 1, 24, 8), 2);
        // The outer axis: adjacent ranks on a node, one rank per node, and both.
        assert_eq!(nodes(2, 4, 8, 8), 1);
        assert_eq!(nodes(4, 8, 32, 8), 4);
        assert_eq!(nodes(4, 6, 24, 8), 3);
    }
}
