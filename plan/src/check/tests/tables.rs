//! Layouts, groups, owners.

use crate::check::testing::{Shape, Toy};
use crate::check::{RuleId, check};
use crate::config::Atomic;
use crate::ir::*;
use crate::shard::{FlatLayout, Layout, PerParamItem, PerParamLayout};

fn flat(t: &mut Toy, group: usize) -> &mut FlatLayout {
    match &mut t.b.program.groups[group].layout {
        Layout::Flat(l) => l,
        Layout::PerParam(_) => unreachable!(),
    }
}

fn message(t: &Toy, rule: RuleId) -> String {
    let r = check(&t.b.program);
    r.of(rule)
        .next()
        .unwrap_or_else(|| panic!("{rule} is not reported\n{r}"))
        .message
        .clone()
}

#[test]
fn a_shard_boundary_within_a_row() {
    // The row that the production engine divided: shapes (1, 3) and (2, 2) over two ranks, without
    // a gap.
    let mut t = Toy::new(Shape::default());
    t.b.program.params[0].shape = [1, 3].as_slice().into();
    t.b.program.params[1].shape = [2, 2].as_slice().into();
    let l = flat(&mut t, 0);
    *l = FlatLayout {
        numel: 12,
        chunk_factor: 6,
        shards: 2,
        atomic: Atomic::Row,
        items: l.items.clone(),
    };
    l.items[0] = crate::shard::FlatItem {
        offset: 0,
        numel: 3,
        ..l.items[0]
    };
    l.items[1] = crate::shard::FlatItem {
        offset: 3,
        numel: 4,
        ..l.items[1]
    };
    let m = message(&t, RuleId::Layout);
    assert!(
        m.contains("shard boundary 6 cuts row 1 of `layers.0.bias`"),
        "{m}"
    );
    // If it starts at the boundary, no row is divided.
    flat(&mut t, 0).items[1].offset = 6;
    assert!(check(&t.b.program).of(RuleId::Layout).next().is_none());
}

/// Blocks of rows, and whole parameters, that a boundary divides.
#[test]
fn a_shard_boundary_within_a_block_or_a_parameter() {
    // 64 rows of 16 over four ranks of 272 elements: 17 rows each.
    let mut t = Toy::new(Shape::default());
    assert!(check(&t.b.program).of(RuleId::Layout).next().is_none());
    flat(&mut t, 1).atomic = Atomic::Block(17);
    assert!(check(&t.b.program).of(RuleId::Layout).next().is_none());
    flat(&mut t, 1).atomic = Atomic::Block(8);
    let m = message(&t, RuleId::Layout);
    assert!(
        m.contains("shard boundary 272 cuts block 2 of `layers.1.weight` (blocks of 128 from 0)"),
        "{m}"
    );
    flat(&mut t, 1).atomic = Atomic::Tensor;
    let m = message(&t, RuleId::Layout);
    assert!(
        m.contains(
            "shard boundary 272 cuts tensor 0 of `layers.1.weight` (tensors of 1024 from 0)"
        ),
        "{m}"
    );
}

#[test]
fn parameters_that_overlap_or_leave_the_buffer() {
    let mut t = Toy::new(Shape::default());
    flat(&mut t, 1).items[1].offset = 1008;
    assert!(
        message(&t, RuleId::Layout)
            .contains("`layers.1.weight` [0, 1024) overlaps `layers.1.bias` at 1008")
    );
    let mut t = Toy::new(Shape::default());
    flat(&mut t, 1).items[1].offset = 1072;
    assert!(message(&t, RuleId::Layout).contains("ends at 1104, the buffer at 1088"));
}

#[test]
fn shards_are_equal_and_rows_divide_the_chunk() {
    let mut t = Toy::new(Shape::default());
    flat(&mut t, 1).numel = 1087;
    assert!(message(&t, RuleId::Layout).contains("1087 elements do not make 4 equal shards"));
    let mut t = Toy::new(Shape::default());
    flat(&mut t, 1).chunk_factor = 24;
    assert!(message(&t, RuleId::Layout).contains("chunk factor 24"));
    let mut t = Toy::new(Shape::default());
    flat(&mut t, 1).items[1].numel = 31;
    assert!(message(&t, RuleId::Layout).contains("gets 31 elements, it has 32"));
}

#[test]
fn per_parameter_shards_are_whole_padded_rows() {
    let item = |param, numel, shard_numel, shard_offset| PerParamItem {
        param: ParamId(param),
        numel,
        shard_numel,
        shard_offset,
    };
    let mut t = Toy::new(Shape::default());
    // 64 rows of 16 and 32 of 1, over 5 ranks: 13 rows and 7.
    let good = vec![item(2, 1024, 208, 0), item(3, 32, 7, 208)];
    t.b.program.groups[1].layout = Layout::PerParam(PerParamLayout {
        shards: 5,
        items: good.clone(),
    });
    assert!(check(&t.b.program).of(RuleId::Layout).next().is_none());
    for (bad, text) in [
        (
            item(3, 32, 6, 208),
            "gets shards of 6, 32 rows of 1 over 5 ranks need 7",
        ),
        (
            item(3, 32, 7, 200),
            "starts at 200 of the shard, 208 is the next free",
        ),
        (item(3, 33, 7, 208), "gets 33 elements, it has 32"),
    ] {
        let items = vec![good[0], bad];
        t.b.program.groups[1].layout = Layout::PerParam(PerParamLayout { shards: 5, items });
        let m = message(&t, RuleId::Layout);
        assert!(m.contains(text), "{m}");
    }
}

#[test]
fn a_group_of_two_kinds() {
    let mut t = Toy::new(Shape::default());
    t.b.program.params[3].requires_grad = false;
    assert!(
        message(&t, RuleId::Group)
            .contains("`layers.1.bias` has requires_grad = false, the group true")
    );
    // A group of fsdp2 may have both, and is trained if any of its parameters is.
    t.b.program.contract.frozen_apart = false;
    assert!(check(&t.b.program).of(RuleId::Group).next().is_none());
    t.b.program.groups[1].requires_grad = false;
    assert!(
        message(&t, RuleId::Group).contains("requires_grad = false, but some of its parameters")
    );
    let mut t = Toy::new(Shape::default());
    t.b.program.units[1].groups.clear();
    assert!(message(&t, RuleId::Group).contains("its unit does not list it"));
    let mut t = Toy::new(Shape::default());
    flat(&mut t, 1).items.pop();
    assert!(message(&t, RuleId::Group).contains("places other parameters than it owns"));
}

#[test]
fn a_tied_parameter_with_two_owners_or_storages() {
    let mut t = Toy::new(Shape::default());
    t.b.program.groups[2].params.push(ParamId(0));
    assert!(
        message(&t, RuleId::Tied)
            .contains("`layers.0.weight` belongs to group 0 of unit layers.0 and to group 2")
    );
    let mut t = Toy::new(Shape::default());
    t.b.program.buffers[t.main[2].index()].holds = Holds::Group(GroupId(0));
    let m = message(&t, RuleId::Tied);
    assert!(m.contains("store the same weights"), "{m}");
    let mut t = Toy::new(Shape::default());
    t.b.program.params.push(t.b.program.params[0].clone());
    assert!(message(&t, RuleId::Tied).contains("belongs to no group"));
}

#[test]
fn optimizer_state_of_full_size() {
    // A fused optimizer that keeps the state of all ranks.
    let mut t = Toy::new(Shape::default());
    let b = t.moments[1];
    t.b.program.buffers[b.index()].bytes = crate::units::Bytes(4 * 1088);
    let m = message(&t, RuleId::StateSharded);
    assert!(
        m.contains("has 1088 elements") && m.contains("have 272"),
        "{m}"
    );
}
