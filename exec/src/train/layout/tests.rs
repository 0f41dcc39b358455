use super::*;
use crate::train::testing::{BASE, plan_of};
use proptest::prelude::*;
use shardlab_plan::ir::AxisId;
use shardlab_plan::shard::Layout;

/// Checks that the primaries of a kind hold each element of `params` exactly once, and that no two
/// spans of a rank overlap.
fn covers(program: &Program, layout: &StateLayout, kind: Kind, trained_only: bool) {
    let mut next: BTreeMap<ParamId, u64> = BTreeMap::new();
    for (_, s) in layout.primaries(kind) {
        let at = next.entry(s.param).or_insert(0);
        assert_eq!(
            s.elements.start,
            *at,
            "{kind:?} of {}",
            program.params[s.param.index()].name
        );
        *at = s.elements.end;
    }
    for (p, param) in (0u32..).zip(&program.params) {
        let expected = if trained_only && !param.requires_grad {
            0
        } else {
            param.numel()
        };
        assert_eq!(
            next.get(&ParamId(p)).copied().unwrap_or(0),
            expected,
            "{kind:?} of {}",
            param.name
        );
    }
    for state in &layout.ranks {
        let mut bytes: Vec<_> = state
            .of(kind)
            .iter()
            .map(|s| (s.buffer, s.offset, s.offset + s.bytes()))
            .collect();
        bytes.sort_unstable();
        assert!(
            bytes
                .windows(2)
                .all(|w| w[0].0 != w[1].0 || w[0].2 <= w[1].1)
        );
        for (buffer, _, end) in bytes {
            assert!(end <= program.buffers[buffer.index()].bytes.0);
        }
    }
}

/// Every rank's resident compute weights are the whole model, or are together with those of its
/// shard axis.
fn weights_cover(program: &Program, layout: &StateLayout) {
    let inner = program.meta.mesh.size(AxisId::DP_SHARD) as usize;
    for replica in layout.ranks.chunks(inner) {
        for (p, param) in (0u32..).zip(&program.params) {
            let mut held: Vec<_> = replica
                .iter()
                .flat_map(|r| &r.weights)
                .filter(|s| s.param == ParamId(p))
                .map(|s| (s.elements.start, s.elements.end))
                .collect();
            held.sort_unstable();
            let mut end = 0;
            for (a, b) in held {
                assert!(a <= end);
                end = end.max(b);
            }
            assert_eq!(end, param.numel(), "{}", param.name);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_element_once(
        family in 0usize..2,
        policy in 0usize..5,
        strategy in 0usize..4,
        mesh in 0usize..7,
        hfsdp in any::<bool>(),
        bf16 in any::<bool>(),
        main in any::<bool>(),
        frozen in any::<bool>(),
        units in 0usize..2,
    ) {
        let (inner, outer) = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 2), (3, 2)][mesh];
        let (policy, mode) = [("native", "off"), ("megatron", "off"), ("megatron_v2", "off"), ("fsdp2", "off"), ("native", "full")][policy];
        let fixed = policy == "fsdp2" || policy == "megatron_v2" || mode == "full";
        let hfsdp = hfsdp && inner > 1 && outer > 1 && !fixed;
        let strategy = if fixed || hfsdp { 3 } else { strategy };
        let strategy = ["no_shard", "optim", "optim_grads", "optim_grads_params"][strategy];
        let mut set = vec![
            format!("mesh.dp_shard={inner}"),
            format!("mesh.dp_outer={outer}"),
            format!("mesh.gpus_per_node={}", inner * outer),
            format!("fsdp.policy={policy}"),
            format!("compile.mode={mode}"),
            format!("fsdp.strategy={strategy}"),
            format!("precision.compute={}", if bf16 { "bf16" } else { "f32" }),
            format!("precision.main_params={}", if main { "f32" } else { "none" }),
            format!("fsdp.units={}", ["block", "root"][units]),
        ];
        if hfsdp {
            set.push("fsdp.outer_strategy=optim".into());
        }
        if frozen {
            set.push("fsdp.frozen=[\"layers.0\"]".into());
        }
        let program = plan_of(BASE[family], &set);
        let layout = StateLayout::new(&program).unwrap();
        covers(&program, &layout, Kind::Master, false);
        covers(&program, &layout, Kind::First, true);
        covers(&program, &layout, Kind::Second, true);
        weights_cover(&program, &layout);
    }
}

/// HFSDP over 2 x 2: rank 1 (inner 1, outer 0) optimizes the third quarter of the flat buffer.
#[test]
fn the_inner_axis_cuts_first() {
    let set = [
        "mesh.dp_shard=2",
        "mesh.dp_outer=2",
        "mesh.gpus_per_node=4",
        "fsdp.outer_strategy=optim",
    ];
    let program = plan_of(BASE[0], &set.map(String::from));
    let layout = StateLayout::new(&program).unwrap();
    let Layout::Flat(flat) = &program.groups[0].layout else {
        panic!()
    };
    let item = flat.items[0];
    assert_eq!(
        item.offset, 0,
        "the first parameter of the root opens its buffer"
    );
    let quarter = flat.numel / 4;
    let of = |rank: usize| {
        layout.ranks[rank]
            .master
            .iter()
            .find(|s| s.param == item.param)
            .map(|s| s.elements.clone())
    };
    assert_eq!(of(0), Some(0..quarter.min(item.numel)));
    assert_eq!(of(2), Some(quarter..(2 * quarter).min(item.numel)));
}
