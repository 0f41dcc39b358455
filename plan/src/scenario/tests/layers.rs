//! Which of several texts wins: extends, files, overrides, sweep axes.

use super::super::*;
use super::{Folder, MINIMAL};
use crate::config::*;
use std::fs;

#[test]
fn later_layers_win_key_by_key() {
    let base = format!("# Base.\n{MINIMAL}[train]\nmicro_batch = 2\ngrad_accum = 2\nlr = 1e-3\n");
    let f = Folder::new(
        "win",
        &[
            ("base.toml", &base),
            (
                "child.toml",
                "# Child line one.\n#\n# Line three.\nextends = \"base.toml\"\n[train]\ngrad_accum = 3\nsteps = 7\n",
            ),
        ],
    );
    let s = load(
        &f.file("child.toml"),
        &["train.steps=8".into(), "train.steps = 9".into()],
    )
    .unwrap();
    assert_eq!(
        (
            s.train.micro_batch,
            s.train.grad_accum,
            s.train.steps,
            s.train.lr
        ),
        (2, 3, 9, 1e-3)
    );
    assert_eq!(
        (s.name.as_str(), s.about.as_str()),
        ("child", "Child line one.\n\nLine three.")
    );
    assert_eq!(load(&f.file("base.toml"), &[]).unwrap().about, "Base.");
}

#[test]
fn a_fault_in_a_base_is_reported_there() {
    let f = Folder::new(
        "fault",
        &[
            ("base.toml", "[model]\npreset = \"gpt2\"\nheads = 7\n"),
            (
                "child.toml",
                "extends = \"base.toml\"\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n",
            ),
        ],
    );
    let e = load(&f.file("child.toml"), &[]).unwrap_err();
    assert!(e.file().ends_with("base.toml"), "{e}");
    assert_eq!(e.position(), Some(Position { line: 3, column: 9 }));
}

#[test]
fn circles_are_named() {
    let f = Folder::new(
        "circle",
        &[
            ("a.toml", "extends = \"b.toml\"\n"),
            ("b.toml", "\nextends = \"a.toml\"\n"),
            ("self.toml", "extends = \"./self.toml\"\n"),
        ],
    );
    let e = load(&f.file("a.toml"), &[]).unwrap_err();
    let shown = e.to_string().replace(&format!("{}/", f.0.display()), "");
    assert!(
        shown.starts_with("b.toml:2:11: `extends` forms a cycle: a.toml -> b.toml -> a.toml\n"),
        "{shown}"
    );
    assert!(
        load(&f.file("self.toml"), &[])
            .unwrap_err()
            .message()
            .contains("cycle")
    );
}

/// A text that is not written yet is in its own way where it will be, whether there is such a file
/// or not.
#[test]
fn a_text_reads_as_it_would_from_its_file() {
    let f = Folder::new(
        "to-be",
        &[
            (
                "base.toml",
                "extends = \"small-native\"\n[train]\nmicro_batch = 4\n",
            ),
            ("child.toml", "extends = \"base.toml\"\n"),
        ],
    );
    let text = "extends = \"child.toml\"\n[train]\nsteps = 3\n";
    let new = load_to_be(&f.file("new.toml"), text).unwrap();
    assert_eq!((new.train.micro_batch, new.train.steps), (4, 3));
    assert_eq!(new.name, "new");
    assert!(!f.file("new.toml").exists());
    let circle = load_to_be(&f.file("base.toml"), text).unwrap_err();
    assert!(circle.message().contains("cycle"), "{circle}");
    let shipped = "extends = \"small-native.toml\"\n";
    assert!(load_to_be(&f.file("new.toml"), shipped).is_ok());
    assert!(load_to_be(&f.file("small-native.toml"), shipped).is_err());
}

#[test]
fn files_that_are_not_there_or_no_text() {
    let f = Folder::new(
        "absent",
        &[("child.toml", "extends = \"llama3-8b-4xh20.toml\"\n")],
    );
    let e = load(&f.file("child.toml"), &[]).unwrap_err();
    assert_eq!(e.help(), Some("did you mean `llama3-8b-4xh200.toml`?"));
    fs::write(f.file("bytes.toml"), [b'#', 0xff, b'\n']).unwrap();
    assert!(
        load(&f.file("bytes.toml"), &[])
            .unwrap_err()
            .message()
            .contains("UTF-8")
    );
    fs::write(f.file("long.toml"), "#".repeat((1 << 20) + 1)).unwrap();
    assert!(
        load(&f.file("long.toml"), &[])
            .unwrap_err()
            .message()
            .contains("longer")
    );
    assert!(load(&f.0, &[]).is_err());
    let e = load("llama3-8b-4xh100".as_ref(), &[]).unwrap_err();
    assert_eq!(
        (e.position(), e.help()),
        (
            None,
            Some("a shipped scenario has a similar name: llama3-8b-4xh200")
        )
    );
    // A name, not a path: the help says where names come from.
    for (name, help) in [
        ("nosuch", "`shardlab scenarios` lists the shipped ones"),
        (
            "qwen3-8b",
            "qwen3-8b is a model: write preset = \"qwen3-8b\" into [model] of a scenario",
        ),
    ] {
        let e = load(name.as_ref(), &[]).unwrap_err();
        assert_eq!(e.message(), "no such file or shipped scenario");
        assert_eq!(e.help(), Some(help));
    }
    let e = load("llama3-8b-4xh200".as_ref(), &["mesh.pp=2".to_owned()]).unwrap_err();
    assert_eq!(e.message(), "unknown key `pp` in [mesh]");
    assert_eq!(e.help(), Some("pipeline parallelism is not modeled"));
}

#[test]
fn a_file_may_extend_a_shipped_scenario() {
    let f = Folder::new(
        "shipped",
        &[(
            "mine.toml",
            "extends = \"prefetch-2.toml\"\n[train]\nsteps = 3\n",
        )],
    );
    let s = load(&f.file("mine.toml"), &[]).unwrap();
    assert_eq!(
        (s.train.steps, s.fsdp.prefetch_forward, s.mesh.dp_shard),
        (3, Prefetch::Depth(2), 16)
    );
}

fn sweep_text(rest: &str) -> String {
    format!("{MINIMAL}[sweep]\n{rest}")
}

fn axis(key: &str, values: &[&str]) -> Axis {
    Axis {
        keys: vec![key.into()],
        values: values.iter().map(|v| vec![(*v).to_owned()]).collect(),
    }
}

#[test]
fn a_sweep_is_the_product_of_its_axes() {
    let text = sweep_text(
        "fsdp.prefetch_forward = [0, 2]\n\"fsdp.reshard_after_forward\" = [true, false, 3]\n",
    );
    let f = Folder::new("sweep", &[("s.toml", &text)]);
    let sweep = load_sweep(&f.file("s.toml"), &["train.steps=5".into()]).unwrap();
    assert_eq!(
        sweep.axes,
        [
            axis("fsdp.prefetch_forward", &["0", "2"]),
            axis("fsdp.reshard_after_forward", &["true", "false", "3"]),
        ]
    );
    let seen: Vec<_> = sweep
        .points
        .iter()
        .map(|p| {
            p.scenario.as_ref().ok().map(|s| {
                (
                    s.fsdp.prefetch_forward,
                    s.fsdp.reshard_after_forward,
                    s.train.steps,
                )
            })
        })
        .collect();
    let of = |d, r| Some((Prefetch::Depth(d), r, 5));
    let (yes, no) = (Reshard::Always, Reshard::Never);
    assert_eq!(
        seen,
        [of(0, yes), of(0, no), None, of(2, yes), of(2, no), None]
    );
    let third = &sweep.points[2];
    assert_eq!(
        third.settings[1],
        ("fsdp.reshard_after_forward".to_owned(), "3".to_owned())
    );
    let e = third.scenario.as_ref().unwrap_err();
    assert_eq!(
        e.position(),
        Some(Position {
            line: 8,
            column: 46
        })
    );
    assert_eq!(sweep.base.fsdp.reshard_after_forward, Reshard::Always);
    // The plain loader takes the base.
    assert_eq!(
        load(&f.file("s.toml"), &["train.steps=5".into()]).unwrap(),
        sweep.base
    );
}

#[test]
fn axes_from_the_command_line() {
    let f = Folder::new("axes", &[("s.toml", &sweep_text("train.steps = [1, 2]\n"))]);
    let path = f.file("s.toml");
    let axes = ["fsdp.policy=[native, fsdp2]".to_owned()];
    assert!(
        sweep_of(&path, &[], &axes)
            .unwrap_err()
            .to_string()
            .starts_with("--axis fsdp.policy=[native, fsdp2]:1:14: ")
    );
    let axes = [
        "fsdp.policy=[\"native\", \"fsdp2\"]".to_owned(),
        "train.steps=[3]".to_owned(),
    ];
    let sweep = sweep_of(&path, &[], &axes).unwrap();
    let steps: Vec<_> = sweep
        .points
        .iter()
        .map(|p| p.scenario.as_ref().unwrap().train.steps)
        .collect();
    assert_eq!(steps, [3, 3]);
    assert_eq!(
        sweep.points[1].settings,
        [
            ("train.steps".into(), "3".into()),
            ("fsdp.policy".into(), "fsdp2".into())
        ]
    );
    // An override may change an axis too.
    let sweep = load_sweep(&path, &["sweep.train.steps=[4, 5, 6]".into()]).unwrap();
    assert_eq!(sweep.points.len(), 3);
}

/// Keys joined by commas go through their values together, in addition to separate axes.
#[test]
fn linked_axes() {
    let text = sweep_text("\"mesh.dp_shard, mesh.dp_replicate\" = [[8, 1], [2, 4]]\n");
    let f = Folder::new("linked", &[("s.toml", &text)]);
    let path = f.file("s.toml");
    let meshes = |axes: &[&str]| -> Vec<(u32, u32)> {
        let axes: Vec<String> = axes.iter().map(|a| (*a).to_owned()).collect();
        let sweep = sweep_of(&path, &[], &axes).unwrap();
        let points = sweep.points.into_iter().map(|p| p.scenario.unwrap().mesh);
        points.map(|m| (m.dp_shard, m.dp_outer)).collect()
    };
    assert_eq!(meshes(&[]), [(8, 1), (2, 4)]);
    let twice = "fsdp.prefetch_forward=[0, 1]";
    assert_eq!(meshes(&[twice]), [(8, 1), (8, 1), (2, 4), (2, 4)]);
    // All keys of the file's axis, in any order, take its place.
    let other = "mesh.dp_replicate,mesh.dp_shard=[[2, 4]]";
    assert_eq!(meshes(&[other]), [(4, 2)]);
    let sweep = sweep_of(&path, &[], &[]).unwrap();
    assert_eq!(
        sweep.keys().collect::<Vec<_>>(),
        ["mesh.dp_shard", "mesh.dp_replicate"]
    );
    let setting = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(
        sweep.points[1].settings,
        [
            setting("mesh.dp_shard", "2"),
            setting("mesh.dp_replicate", "4")
        ]
    );
    // One key alone would leave the other without values; the place is that of the key.
    for (option, given) in [
        (
            "--axis mesh.dp_replicate=[2]:1:1:",
            sweep_of(&path, &[], &["mesh.dp_replicate=[2]".into()]),
        ),
        (
            "--set sweep.mesh.dp_replicate=[2]:1:7:",
            load_sweep(&path, &["sweep.mesh.dp_replicate=[2]".into()]),
        ),
        (
            "--axis mesh.dp_shard,mesh.dp_outr=[[4, 1]]:1:15:",
            sweep_of(&path, &[], &["mesh.dp_shard,mesh.dp_outr=[[4, 1]]".into()]),
        ),
    ] {
        let e = given.unwrap_err().to_string();
        assert!(e.starts_with(option), "{e}");
    }
}

#[test]
fn a_base_may_need_its_axes() {
    let text = "[model]\nfamily = \"linear\"\nhidden = 8\n[mesh]\nhardware = \"cpu\"\ndp_shard = 1\n[sweep]\nmodel.layers = [2, 3]\n";
    let f = Folder::new(
        "needs",
        &[
            ("s.toml", text),
            (
                "never.toml",
                &text.replace("[2, 3]", "[2, 3]\nmodel.heads = [3]"),
            ),
        ],
    );
    let sweep = load_sweep(&f.file("s.toml"), &[]).unwrap();
    assert_eq!((sweep.base.model.layers, sweep.points.len()), (2, 2));
    assert!(load_sweep(&f.file("never.toml"), &[]).is_err());
    let plain = Folder::new("plain", &[("s.toml", MINIMAL)]);
    let sweep = load_sweep(&plain.file("s.toml"), &[]).unwrap();
    assert_eq!((sweep.axes.len(), sweep.points.len()), (0, 1));
}

#[test]
fn sweeps_have_a_limit() {
    let values: Vec<String> = (1..=400).map(|n| n.to_string()).collect();
    let list = values.join(", ");
    let text = sweep_text(&format!(
        "train.steps = [{list}]\ntrain.validate_every = [{list}]\n"
    ));
    let e = parse("x.toml", &text, &[]).unwrap_err();
    assert!(e.message().contains("100000 points"), "{e}");
}

/// A base may set what a later text makes idle; the defaults say nothing; what would be lost is
/// never dropped.
#[test]
fn what_a_later_text_makes_idle_is_no_mistake() {
    let base = format!(
        "{MINIMAL}[fsdp]\nprefetch_forward = 2\noffload = [\"params\"]\n[compile]\nmode = \"off\"\n"
    );
    let with = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
        parse("x.toml", &base, &sets)
    };
    let full = ["fsdp.offload=[]", "compile.mode=full"];
    with(&full).unwrap();
    with(&[&full[..], &["fsdp.prefetch_forward=1"]].concat()).unwrap();
    let e = with(&[&full[..], &["fsdp.prefetch_forward=3"]].concat()).unwrap_err();
    assert!(
        e.message().contains("`prefetch_forward` has no effect"),
        "{e}"
    );
    let e = with(&full[1..]).unwrap_err();
    assert!(e.message().contains("has no host offload"), "{e}");
}

/// A path is relative to the file that it is written in, wherever that is extended from; one from
/// outside is not touched.
#[test]
fn a_profile_lies_beside_the_file_that_names_it() {
    let base = MINIMAL.replace("\"h200-nvlink\"", "\"../profiles/mine.toml\"");
    assert_ne!(base, MINIMAL);
    let f = Folder::new("profile", &[]);
    for (name, text) in [
        ("profiles/mine.toml", ""),
        ("profiles/other.toml", ""),
        ("bases/base.toml", base.as_str()),
        ("child.toml", "extends = \"bases/base.toml\"\n"),
        (
            "swept.toml",
            "extends = \"bases/base.toml\"\n[sweep]\nmesh.hardware = [\"profiles/other.toml\", \"a100-40\"]\n",
        ),
        (
            "absent.toml",
            "extends = \"bases/base.toml\"\n[mesh]\nhardware = \"mine.toml\"\n",
        ),
        (
            "shipped.toml",
            "extends = \"bases/base.toml\"\n[mesh]\nhardware = \"cpu\"\n",
        ),
    ] {
        fs::create_dir_all(f.file(name).parent().unwrap()).unwrap();
        fs::write(f.file(name), text).unwrap();
    }
    let of = |name: &str, set: &[String]| load(&f.file(name), set).map(|s| s.mesh.hardware);
    let mine = f.file("bases/../profiles/mine.toml").display().to_string();
    assert_eq!(of("bases/base.toml", &[]).unwrap(), mine);
    assert_eq!(of("child.toml", &[]).unwrap(), mine);
    assert_eq!(of("shipped.toml", &[]).unwrap(), "cpu");
    let outside = of("child.toml", &["mesh.hardware=any/profile.toml".into()]);
    assert_eq!(outside.unwrap(), "any/profile.toml");

    let sweep = load_sweep(&f.file("swept.toml"), &[]).unwrap();
    assert_eq!(sweep.base.mesh.hardware, mine);
    let other = f.file("profiles/other.toml").display().to_string();
    // As an override from outside would have it.
    assert_eq!(
        sweep.axes[0].values,
        [vec![other.clone()], vec!["a100-40".into()]]
    );
    let points: Vec<String> = sweep
        .points
        .into_iter()
        .map(|p| p.scenario.unwrap().mesh.hardware)
        .collect();
    assert_eq!(points, [other, "a100-40".into()]);

    let e = of("absent.toml", &[]).unwrap_err();
    assert!(e.file().ends_with("absent.toml"), "{e}");
    assert_eq!(
        e.position(),
        Some(Position {
            line: 3,
            column: 12
        })
    );
    let looked_for = f.file("mine.toml").display().to_string();
    assert!(e.message().contains(&looked_for), "{e}");
}
