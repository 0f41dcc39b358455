//! Trains on this machine, with the device that `shardlab exec` would choose.

mod child;
mod here;

pub(crate) use child::Children;

use super::{Ended, Reporter, Stop};
use crate::cli::DeviceArgs;
use crate::dash::event::{News, Setup};
use shardlab_plan::program::{Op, SectionKind};
use shardlab_plan::units::Bytes;
use shardlab_plan::{Program, Scenario, plan, scenario};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Share of the machine's free memory that a training may use without a confirmation.
const SHARE: f64 = 0.7;

/// Settings of trainings.
#[derive(Debug)]
pub(crate) struct Trainer {
    /// Requested device.
    pub(crate) device: DeviceArgs,
    /// The program to start if ranks are processes or run on GPUs, which is this program.
    pub(crate) program: PathBuf,
    /// Processes that have been started.
    pub(crate) children: Children,
}

/// A requested training.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) setup: &'a Setup,
    /// Number of steps, if it is not the scenario's.
    pub(super) steps: Option<u64>,
    /// Whether to train even if it needs more memory than available.
    pub(super) anyway: bool,
    /// Whether to train on the CPU, even if the scenario's hardware is different.
    pub(super) on_cpu: bool,
}

/// A requested training with its resolved device.
struct What<'a> {
    setup: &'a Setup,
    steps: Option<u64>,
    scenario: &'a Scenario,
    program: &'a Arc<Program>,
    /// Resolved device.
    device: &'a DeviceArgs,
}

impl What<'_> {
    /// Returns whether another process trains, so that a fault in a GPU library cannot end the
    /// dashboard.
    fn elsewhere(&self) -> bool {
        self.device.is_gpus() || self.device.wants_processes(self.program)
    }

    /// Returns the device as a phrase after "on". `name` is the name of the GPU, once it is known.
    fn place(&self, name: Option<&str>) -> String {
        match name {
            Some(name) if self.device.is_gpus() => {
                format!("{} x {name}", self.program.meta.mesh.world())
            }
            None if self.device.is_gpus() => "GPUs".to_owned(),
            _ if self.elsewhere() => "the CPU, one process per rank".to_owned(),
            _ => "the CPU, ranks as threads".to_owned(),
        }
    }
}

/// Trains. If another process trained, the run is in `store`; otherwise it is only in the report.
pub(super) fn train(
    asked: Asked<'_>,
    trainer: &Trainer,
    store: Option<&Path>,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    let Asked { setup, steps, .. } = asked;
    let scenario = scenario::load(&setup.path, &setup.overrides).map_err(|e| e.to_string())?;
    let program = Arc::new(plan(&scenario).map_err(|e| e.to_string())?);
    let device = if asked.on_cpu {
        trainer.device.on_cpu()
    } else {
        trainer.device.settled(&scenario)
    };
    let what = What {
        setup,
        steps,
        scenario: &scenario,
        program: &program,
        device: &device,
    };
    reporter.say(News::On(what.place(None)));
    if !device.is_gpus()
        && !asked.anyway
        && let Some(reason) = too_large(&program)
    {
        reporter.say(News::TooLarge(reason));
        return Ok(Ended::Cancelled);
    }
    reporter.say(News::RunStart(
        steps.unwrap_or_else(|| scenario.train.steps.into()),
    ));
    if what.elsewhere() {
        child::train(&what, trainer, store, reporter, stop)
    } else {
        here::train(&what, reporter, stop)
    }
}

/// Returns the reason why this machine probably has too little memory, which all ranks share.
fn too_large(program: &Program) -> Option<String> {
    let free = free_memory()?;
    // Only persistent state counts. An upper bound, with the initialization and the step's own
    // buffers without reuse, would reject too much.
    let resting: u64 = program
        .section(SectionKind::Init)
        .into_iter()
        .chain(program.section(SectionKind::First))
        .flat_map(|s| program.section_instrs(s))
        .filter_map(|i| match i.op {
            Op::Alloc(b) => Some((b, 1i64)),
            Op::Free(b) => Some((b, -1)),
            _ => None,
        })
        .map(|(b, sign)| sign * program.buffers[b.index()].bytes.0 as i64)
        .sum::<i64>()
        .max(0) as u64;
    let needed = resting.saturating_mul(u64::from(program.meta.mesh.world()));
    (needed as f64 > SHARE * free as f64).then(|| {
        format!(
            "its {} ranks keep {} between steps, but only {} of memory are free",
            program.meta.mesh.world(),
            Bytes(needed),
            Bytes(free)
        )
    })
}

/// Returns the free memory of the machine in bytes, if the system reports it.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_is_far_too_large_is_refused_with_its_size() {
        let large =
            plan(&scenario::load(Path::new("llama3-405b-1024xh100"), &[]).unwrap()).unwrap();
        let reason = too_large(&large).unwrap();
        assert!(reason.starts_with("its 1024 ranks keep"), "{reason}");
        let small = plan(&scenario::load(Path::new("small-native"), &[]).unwrap()).unwrap();
        assert_eq!(too_large(&small), None);
    }

    /// GPU trainings always run in another process; `X` requests the CPU.
    #[test]
    fn another_process_trains_on_gpus_or_where_it_is_wanted() {
        let setup = Setup {
            path: "small-native".into(),
            overrides: Vec::new(),
        };
        let scenario = scenario::load(&setup.path, &[]).unwrap();
        let program = Arc::new(plan(&scenario).unwrap());
        let of = |device: &DeviceArgs| {
            let what = What {
                setup: &setup,
                steps: None,
                scenario: &scenario,
                program: &program,
                device,
            };
            let places = [what.place(None), what.place(Some("NVIDIA H200"))];
            (what.elsewhere(), places)
        };
        let threads = "the CPU, ranks as threads".to_owned();
        let processes = "the CPU, one process per rank".to_owned();
        let gpus = ["GPUs".to_owned(), "4 x NVIDIA H200".to_owned()];
        for (words, elsewhere, places) in [
            (&["--device", "cpu"][..], false, [&threads; 2]),
            (&["--device", "cpu", "--processes"], true, [&processes; 2]),
            (&["--device", "cuda"], true, gpus.each_ref()),
            (
                &["--device", "cuda", "--one-process"],
                true,
                gpus.each_ref(),
            ),
        ] {
            let device = DeviceArgs::said(words);
            let places = places.map(String::clone);
            assert_eq!(of(&device), (elsewhere, places), "{words:?}");
        }
        let on_cpu = DeviceArgs::said(&["--device", "cuda"]).on_cpu();
        assert_eq!(of(&on_cpu), (false, [threads.clone(), threads]));
        // The scenario's hardware is the CPU, so `auto` means the CPU on any machine.
        let auto = DeviceArgs::said(&[]).settled(&scenario);
        assert!(!of(&auto).0);
    }

    /// Requested options come first, because the name of a file may start with any character.
    #[test]
    fn the_command_says_what_is_trained() {
        let setup = Setup {
            path: "-odd.toml".into(),
            overrides: vec!["train.lr=1".into(), "train.steps=3".into()],
        };
        let scenario = scenario::load(Path::new("small-native"), &[]).unwrap();
        let program = Arc::new(plan(&scenario).unwrap());
        let what = What {
            setup: &setup,
            steps: Some(2),
            scenario: &scenario,
            program: &program,
            device: &DeviceArgs::said(&["--device", "cuda", "--gpu", "1"]),
        };
        let command = child::command(&what, Path::new("shardlab"), Path::new("runs"));
        let args: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
        let wanted = "exec --progress json --device cuda --gpu 1 --steps 2 --set train.lr=1 --set train.steps=3 --store runs -- -odd.toml";
        assert_eq!(args.join(" "), wanted);
    }
}
