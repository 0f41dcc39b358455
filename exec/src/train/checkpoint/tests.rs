use super::*;
use crate::train::init;
use crate::train::layout::{Kind, StateLayout};
use crate::train::state::StateIo;
use crate::train::testing::{BASE, Memory, scenario_of};
use shardlab_plan::Program;
use shardlab_plan::ir::ParamId;

struct Setup {
    program: Program,
    layout: StateLayout,
    memory: Memory,
}

impl Setup {
    fn new(set: &[&str]) -> Self {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let program = shardlab_plan::plan(&scenario_of(BASE[0], &set)).unwrap();
        let layout = StateLayout::new(&program).unwrap();
        let memory = Memory::new(&program);
        Self {
            program,
            layout,
            memory,
        }
    }

    /// Weights from a seed, and moments that identify parameter, kind and element.
    fn fill(&mut self) {
        init::from_seed(&self.program, &self.layout, 4, &mut self.memory).unwrap();
        for (rank, state) in (0u32..).zip(&self.layout.ranks) {
            for (kind, base) in [(Kind::First, 0.25f32), (Kind::Second, 0.75)] {
                for s in state.of(kind) {
                    let values: Vec<f32> = s
                        .elements
                        .clone()
                        .map(|e| base + (s.param.0 * 100_000) as f32 + e as f32)
                        .collect();
                    let data = crate::train::data::encode(&values, s.dtype);
                    self.memory.write(rank, s.buffer, s.offset, &data).unwrap();
                }
            }
        }
    }

    fn save(&mut self, store: &Store, step: u64) {
        let newest = store.steps().unwrap().last().copied();
        self.save_after(store, newest.unwrap_or(0), step);
    }

    fn save_after(&mut self, store: &Store, after: u64, step: u64) {
        let progress = Progress {
            step,
            samples: 8 * step,
            losses: vec![Some(1.5), None],
            ..Progress::default()
        };
        Snapshot::take(&self.program, &self.layout, &mut self.memory, progress)
            .unwrap()
            .write(store, after, &crate::process::ProcessGroup::single())
            .unwrap();
    }

    fn load(&mut self, path: &Path) -> Result<Progress, TrainError> {
        let mut c = Checkpoint::open(path)?;
        c.load(&self.program, &self.layout, &mut self.memory)?;
        Ok(c.progress().clone())
    }

    /// Returns all elements of a kind, by parameter.
    fn all(&mut self, kind: Kind) -> Vec<Vec<f32>> {
        let mut out = vec![Vec::new(); self.program.params.len()];
        for (rank, s) in self.layout.primaries(kind) {
            let bytes = self
                .memory
                .read(rank, s.buffer, s.offset, s.bytes())
                .unwrap();
            out[s.param.index()].extend(crate::train::data::floats(&bytes, s.dtype));
        }
        out
    }
}

#[test]
fn what_is_saved_loads_into_any_other_mesh_strategy_policy_and_precision() {
    let sets: [&[&str]; 8] = [
        &["mesh.dp_shard=1"],
        &["mesh.dp_shard=2"],
        &["mesh.dp_shard=3", "mesh.gpus_per_node=3"],
        &["mesh.dp_shard=4", "fsdp.policy=fsdp2"],
        &[
            "mesh.dp_shard=2",
            "mesh.dp_outer=2",
            "fsdp.outer_strategy=optim",
        ],
        &[
            "mesh.dp_shard=4",
            "fsdp.strategy=optim",
            "fsdp.policy=megatron",
        ],
        &["fsdp.strategy=no_shard", "precision.main_params=none"],
        &["precision.compute=bf16", "fsdp.strategy=optim_grads"],
    ];
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 20).unwrap();
    let mut reference = Setup::new(&[]);
    reference.fill();
    for (i, from) in sets.iter().enumerate() {
        let mut source = Setup::new(from);
        source.fill();
        source.save(&store, i as u64 + 1);
        for to in sets {
            let mut target = Setup::new(to);
            let progress = target.load(&store.path(i as u64 + 1)).unwrap();
            assert_eq!(
                (progress.step, progress.samples),
                (i as u64 + 1, 8 * (i as u64 + 1))
            );
            assert_eq!(progress.losses, [Some(1.5), None]);
            for kind in Kind::ALL {
                assert_eq!(
                    target.all(kind),
                    reference.all(kind),
                    "{kind:?} {from:?} -> {to:?}"
                );
            }
            // Every resident weight, including compute weights.
            let mut made = Setup::new(to);
            made.fill();
            for (rank, state) in (0u32..).zip(&made.layout.ranks) {
                for s in &state.weights {
                    let of = |m: &mut Memory| m.read(rank, s.buffer, s.offset, s.bytes()).unwrap();
                    assert_eq!(of(&mut target.memory), of(&mut made.memory));
                }
            }
        }
    }
}

/// Five rows over four ranks leave rank 3 without elements of some parameters, and with empty files
/// if it has none.
#[test]
fn replicas_are_stored_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 1).unwrap();
    let mut s = Setup::new(&["mesh.dp_shard=1", "mesh.dp_outer=3", "mesh.gpus_per_node=3"]);
    s.fill();
    s.save(&store, 1);
    let c = Checkpoint::open(&store.path(1)).unwrap();
    assert_eq!(c.index().files.len(), 3);
    assert!(
        c.index()
            .pieces
            .iter()
            .all(|p| p.file.starts_with("rank-00000"))
    );
    let total: u64 = c.index().pieces.iter().map(|p| p.numel).sum();
    assert_eq!(
        total,
        3 * s.program.params.iter().map(|p| p.numel()).sum::<u64>()
    );
}

#[test]
fn old_ones_go_and_leftovers_too() {
    let dir = tempfile::tempdir().unwrap();
    let mut s = Setup::new(&[]);
    s.fill();
    let store = Store::open(dir.path(), 2).unwrap();
    for step in [5, 10, 15] {
        s.save(&store, step);
    }
    assert_eq!(store.steps().unwrap(), [10, 15]);
    // As after a crash during the write.
    std::fs::create_dir(dir.path().join(".tmp-step-00000020")).unwrap();
    let store = Store::open(dir.path(), 2).unwrap();
    assert_eq!(store.steps().unwrap(), [10, 15]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    assert!(Checkpoint::open(&store.path(15)).is_ok());
}

/// Checkpoints of an earlier training in the same folder are neither removed nor resumed from.
#[test]
fn another_training_is_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let mut s = Setup::new(&[]);
    s.fill();
    let store = Store::open(dir.path(), 3).unwrap();
    for step in [100, 200, 300] {
        s.save(&store, step);
    }
    let aside = || {
        let names = store.entries().unwrap().into_iter().map(|e| e.1);
        names.filter(|n| n.contains("aside")).collect::<Vec<_>>()
    };
    // Continued from step 100, then restarted: the newest checkpoints always belong to the current
    // training.
    for (after, step) in [(100, 250), (250, 260), (260, 270)] {
        s.save_after(&store, after, step);
        assert_eq!(store.steps().unwrap().last(), Some(&step));
    }
    assert_eq!(store.steps().unwrap(), [250, 260, 270]);
    assert_eq!(aside(), ["step-00000200.aside-1", "step-00000300.aside-1"]);
    assert_eq!(store.beyond(250).unwrap(), [260, 270]);
    s.save_after(&store, 0, 10);
    assert_eq!(store.steps().unwrap(), [10]);
    s.save_after(&store, 0, 10);
    assert_eq!(store.steps().unwrap(), [10]);
    assert_eq!(aside().len(), 6);
    let store = Store::open(dir.path(), 3).unwrap();
    assert!(Checkpoint::open(&dir.path().join("step-00000010.aside-1")).is_ok());
    assert!(Checkpoint::open(&store.path(10)).is_ok());
}

#[test]
fn damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 3).unwrap();
    let mut s = Setup::new(&[]);
    s.fill();
    s.save(&store, 1);
    let path = store.path(1);
    for name in [
        "index.json",
        "index.blake3",
        "rank-00001-of-00002.safetensors",
    ] {
        let file = path.join(name);
        let good = std::fs::read(&file).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 1;
        for bad in [&flipped[..], &good[..good.len() - 1], &[]] {
            std::fs::write(&file, bad).unwrap();
            let e = Checkpoint::open(&path).unwrap_err().to_string();
            assert!(
                e.contains(if name == "index.blake3" {
                    "index.json"
                } else {
                    name
                }),
                "{e}"
            );
            assert!(e.contains("corrupt"), "{e}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(
            Checkpoint::open(&path)
                .unwrap_err()
                .to_string()
                .contains(name)
        );
        std::fs::write(&file, good).unwrap();
    }
    assert!(Checkpoint::open(&path).is_ok());
}

#[test]
fn every_missing_state_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 3).unwrap();
    let mut sgd = Setup::new(&["train.optimizer=sgd"]);
    sgd.fill();
    sgd.save(&store, 1);
    let e = Setup::new(&[]).load(&store.path(1)).unwrap_err();
    let TrainError::Missing { names, .. } = &e else {
        panic!("{e}")
    };
    let params = Setup::new(&[]).program.params.len();
    assert_eq!(names.len(), 2 * params);
    assert!(names.contains(&"exp_avg of layers.1.mlp.w2.weight".to_owned()));
    // In the other direction nothing is missing, and neither before the first step.
    let mut adamw = Setup::new(&[]);
    adamw.fill();
    adamw.save(&store, 2);
    Setup::new(&["train.optimizer=sgd"])
        .load(&store.path(2))
        .unwrap();
    sgd.save(&store, 0);
    Setup::new(&[]).load(&store.path(0)).unwrap();

    let e = Setup::new(&["model.layers=3"])
        .load(&store.path(2))
        .unwrap_err();
    let TrainError::Missing { names, .. } = &e else {
        panic!("{e}")
    };
    assert_eq!(names.len(), 9);
    let e = Setup::new(&["model.layers=1"])
        .load(&store.path(2))
        .unwrap_err()
        .to_string();
    assert!(e.contains("layers.1.attention.q.weight"), "{e}");
    let e = Setup::new(&["model.ffn=48"])
        .load(&store.path(2))
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("has shape [40, 24], the model's is [48, 24]"),
        "{e}"
    );
}

#[test]
fn saving_in_the_background_reports_its_errors() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), 3).unwrap();
    let mut s = Setup::new(&[]);
    s.fill();
    let mut snapshot = |step| {
        let progress = Progress {
            step,
            ..Progress::default()
        };
        Snapshot::take(&s.program, &s.layout, &mut s.memory, progress).unwrap()
    };
    let mut saver = Saver::new(
        store.clone(),
        0,
        std::sync::Arc::new(crate::process::ProcessGroup::single()),
    );
    saver.save(snapshot(1)).unwrap();
    saver.save(snapshot(2)).unwrap();
    saver.finish().unwrap();
    assert_eq!(store.steps().unwrap(), [1, 2]);
    // A file in place of the temporary folder.
    std::fs::write(dir.path().join(".tmp-step-00000003"), "x").unwrap();
    saver.save(snapshot(3)).unwrap();
    assert!(saver.finish().is_err());
    assert_eq!(store.steps().unwrap(), [1, 2]);
    assert!(Checkpoint::open(&store.path(2)).is_ok());
    assert_eq!(
        s.layout.weights(&mut s.memory, ParamId(0)).unwrap().len(),
        53 * 24
    );
}
