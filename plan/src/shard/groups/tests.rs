use super::*;
use smallvec::smallvec;

/// Returns embedding, two blocks (attention, mlp), norm, output.
fn llama() -> Vec<Module> {
    let rows: [(&str, Option<u32>, ModuleKind); 10] = [
        ("", None, ModuleKind::Root),
        ("embedding", Some(0), ModuleKind::Embedding),
        ("layers.0", Some(0), ModuleKind::Block),
        ("layers.0.attention", Some(2), ModuleKind::Attention),
        ("layers.0.mlp", Some(2), ModuleKind::Mlp),
        ("layers.1", Some(0), ModuleKind::Block),
        ("layers.1.attention", Some(5), ModuleKind::Attention),
        ("layers.1.mlp", Some(5), ModuleKind::Mlp),
        ("norm", Some(0), ModuleKind::Norm),
        ("output", Some(0), ModuleKind::Head),
    ];
    rows.into_iter()
        .map(|(path, parent, kind)| Module {
            path: path.into(),
            parent: parent.map(ModuleId),
            kind,
        })
        .collect()
}

fn param(name: &str, modules: &[u32], shape: &[u64]) -> Param {
    Param {
        name: name.into(),
        modules: modules.iter().map(|&m| ModuleId(m)).collect(),
        shape: shape.iter().copied().collect(),
        placements: Default::default(),
        requires_grad: true,
        router_bias: false,
        group: 0,
        packed: None,
        init: crate::ir::Init::Zeros,
        hf: None,
    }
}

fn params(tied: bool) -> Vec<Param> {
    let mut v = vec![param(
        "embedding.weight",
        if tied { &[1, 9] } else { &[1] },
        &[16, 4],
    )];
    for (l, (attention, mlp)) in [(3, 4), (6, 7)].into_iter().enumerate() {
        v.push(param(
            &format!("layers.{l}.attention.weight"),
            &[attention],
            &[4, 4],
        ));
        v.push(param(&format!("layers.{l}.mlp.weight"), &[mlp], &[8, 4]));
    }
    v.push(param("norm.weight", &[8], &[4]));
    if !tied {
        v.push(param("output.weight", &[9], &[16, 4]));
    }
    v
}

fn names(specs: &[UnitSpec]) -> Vec<&str> {
    specs.iter().map(|s| s.name.as_str()).collect()
}

fn pattern(modules: &[&str], keep: bool) -> UnitPattern {
    UnitPattern {
        modules: modules.iter().map(|&m| m.into()).collect(),
        keep,
    }
}

fn grouped(specs: &[UnitSpec], params: &[Param]) -> Vec<(u16, bool, Vec<u32>)> {
    grouped_as(specs, params, true)
}

fn grouped_as(
    specs: &[UnitSpec],
    params: &[Param],
    frozen_apart: bool,
) -> Vec<(u16, bool, Vec<u32>)> {
    build_groups(
        specs,
        &llama(),
        params,
        |_| LayoutKind::PerParam { shards: 2 },
        &[],
        Apart {
            frozen: frozen_apart,
            float8: &[],
            float8_mixed: false,
            float8_rows: None,
            muon: &[],
            muon_mixed: false,
            ignored: &[],
        },
    )
    .unwrap()
    .into_iter()
    .map(|g| {
        (
            g.unit.0,
            g.requires_grad,
            g.params.iter().map(|p| p.0).collect(),
        )
    })
    .collect()
}

#[test]
fn blocks_and_root() {
    let specs = assign_units(&Units::Block, &llama()).unwrap();
    assert_eq!(names(&specs), ["root", "layers.0", "layers.1"]);
    assert!(specs[0].is_root && !specs[0].is_block && specs[1].is_block);
    assert_eq!(
        grouped(&specs, &params(false)),
        [
            (0, true, vec![0, 5, 6]),
            (1, true, vec![1, 2]),
            (2, true, vec![3, 4])
        ]
    );
}

#[test]
fn root_alone_owns_everything() {
    let specs = assign_units(&Units::Root, &llama()).unwrap();
    assert_eq!(
        grouped(&specs, &params(false)),
        [(0, true, vec![0, 1, 2, 3, 4, 5, 6])]
    );
}

/// torchtitan's units: the embedding, the blocks, and `[norm, output]`, which stays full after
/// forward. The root has no parameters left.
#[test]
fn torchtitan_patterns() {
    let units = Units::Patterns(vec![
        pattern(&["norm", "output"], true),
        pattern(&["layers.*"], false),
        pattern(&["embedding"], false),
    ]);
    let specs = assign_units(&units, &llama()).unwrap();
    assert_eq!(
        names(&specs),
        ["root", "embedding", "layers.0", "layers.1", "norm+output"]
    );
    assert_eq!(
        specs.iter().map(|s| s.keep).collect::<Vec<_>>(),
        [false, false, false, false, true]
    );
    assert_eq!(
        grouped(&specs, &params(false)),
        [
            (1, true, vec![0]),
            (2, true, vec![1, 2]),
            (3, true, vec![3, 4]),
            (4, true, vec![5, 6])
        ]
    );
    // With tied embeddings, two units use the shared weight, so the root owns it.
    assert_eq!(
        grouped(&specs, &params(true)),
        [
            (0, true, vec![0]),
            (2, true, vec![1, 2]),
            (3, true, vec![3, 4]),
            (4, true, vec![5])
        ]
    );
    // torchtitan's solution for tied embeddings: one unit around all modules that use the weight.
    let units = Units::Patterns(vec![pattern(&["embedding", "norm", "output"], true)]);
    let specs = assign_units(&units, &llama()).unwrap();
    assert_eq!(names(&specs), ["root", "embedding+norm+output"]);
    assert_eq!(
        grouped(&specs, &params(true)),
        [(0, true, vec![1, 2, 3, 4]), (1, true, vec![0, 5])]
    );
}

#[test]
fn inner_units_own_their_part() {
    let units = Units::Patterns(vec![
        pattern(&["layers.*"], false),
        pattern(&["layers.*.mlp"], false),
    ]);
    let specs = assign_units(&units, &llama()).unwrap();
    assert_eq!(
        names(&specs),
        [
            "root",
            "layers.0",
            "layers.0.mlp",
            "layers.1",
            "layers.1.mlp"
        ]
    );
    let mut p = params(false);
    // A weight shared by a block and a unit inside it belongs to the block.
    p[1].modules = smallvec![ModuleId(3), ModuleId(4)];
    assert_eq!(
        owners(&specs, &llama(), &p)
            .iter()
            .map(|u| u.0)
            .collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 0, 0]
    );
}

#[test]
fn frozen_parameters_form_their_own_group() {
    let specs = assign_units(&Units::Block, &llama()).unwrap();
    let mut p = params(false);
    p[1].requires_grad = false;
    assert_eq!(
        grouped(&specs, &p),
        [
            (0, true, vec![0, 5, 6]),
            (1, false, vec![1]),
            (1, true, vec![2]),
            (2, true, vec![3, 4])
        ]
    );
    // Or all are in one group, which is trained if any parameter is.
    p[3].requires_grad = false;
    p[4].requires_grad = false;
    assert_eq!(
        grouped_as(&specs, &p, false),
        [
            (0, true, vec![0, 5, 6]),
            (1, true, vec![1, 2]),
            (2, false, vec![3, 4])
        ]
    );
}

#[test]
fn errors_name_the_nearest() {
    let e = assign_units(
        &Units::Patterns(vec![pattern(&["layer.*"], false)]),
        &llama(),
    )
    .unwrap_err();
    assert_eq!(
        e.to_string(),
        "unit pattern `layer.*` matches no module; did you mean `layers.*`?"
    );
    let twice = Units::Patterns(vec![
        pattern(&["layers.*"], false),
        pattern(&["layers.1"], false),
    ]);
    let e = assign_units(&twice, &llama()).unwrap_err();
    assert_eq!(
        e.to_string(),
        "module `layers.1` is in two units: `layers.1` and `layers.1`"
    );
    let mut p = params(false);
    p[1].shape = smallvec![4, 0];
    let specs = assign_units(&Units::Block, &llama()).unwrap();
    let e = build_groups(
        &specs,
        &llama(),
        &p,
        |_| LayoutKind::Flat {
            shards: 2,
            pad: true,
            atomic: Atomic::Row,
        },
        &[],
        Apart {
            frozen: true,
            float8: &[],
            float8_mixed: false,
            float8_rows: None,
            muon: &[],
            muon_mixed: false,
            ignored: &[],
        },
    )
    .unwrap_err();
    assert!(e.to_string().starts_with("unit `layers.0`: "), "{e}");
    p[1].shape = smallvec![2, u64::MAX, 2];
    let e = build_groups(
        &specs,
        &llama(),
        &p,
        |_| LayoutKind::PerParam { shards: 2 },
        &[],
        Apart {
            frozen: true,
            float8: &[],
            float8_mixed: false,
            float8_rows: None,
            muon: &[],
            muon_mixed: false,
            ignored: &[],
        },
    )
    .unwrap_err();
    assert!(e.to_string().contains("2^59"), "{e}");
}
