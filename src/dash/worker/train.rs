//! Training on this machine, watched: on what `shardlab exec` would take.

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

/// Share of the machine's free memory that a training may take without a question.
const SHARE: f64 = 0.7;

/// What trains.
#[derive(Debug)]
pub(crate) struct Trainer {
    /// The device that is asked for.
    pub(crate) device: DeviceArgs,
    /// The program that is started where ranks are processes, or on GPUs: this one.
    pub(crate) program: PathBuf,
    /// What has been started.
    pub(crate) children: Children,
}

/// What is to be trained.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) setup: &'a Setup,
    /// If not the scenario's.
    pub(super) steps: Option<u64>,
    /// Even if it needs more memory than there is.
    pub(super) anyway: bool,
    /// Whatever the scenario's hardware is.
    pub(super) on_cpu: bool,
}

/// Likewise, with what has been found out about it.
struct What<'a> {
    setup: &'a Setup,
    steps: Option<u64>,
    scenario: &'a Scenario,
    program: &'a Arc<Program>,
    /// Settled.
    device: &'a DeviceArgs,
}

impl What<'_> {
    /// Whether another process trains: no fault of a GPU's libraries ends the dashboard.
    fn elsewhere(&self) -> bool {
        self.device.is_gpus() || self.device.wants_processes(self.program)
    }

    /// What it is trained on, in words that stand behind "on"; `name` is a GPU's, once that is known.
    fn place(&self, name: Option<&str>) -> String {
        match name {
            Some(name) if self.device.is_gpus() => format!("{} x {name}", self.program.meta.world),
            None if self.device.is_gpus() => "GPUs".to_owned(),
            _ if self.elsewhere() => "the CPU, a process a rank".to_owned(),
            _ => "the CPU, ranks as threads".to_owned(),
        }
    }
}

/// Trains. The run is in `store` afterwards if another process has trained, else in the report only.
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
    reporter.say(News::Begun(
        steps.unwrap_or_else(|| scenario.train.steps.into()),
    ));
    if what.elsewhere() {
        child::train(&what, trainer, store, reporter, stop)
    } else {
        here::train(&what, reporter, stop)
    }
}

/// Why this machine is too small, if it seems so: all ranks live in its memory.
fn too_large(program: &Program) -> Option<String> {
    let free = free_memory()?;
    // Init and a step's own buffers, without reuse: an upper bound would refuse too much, so only what rests is counted.
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
    let needed = resting.saturating_mul(u64::from(program.meta.world));
    (needed as f64 > SHARE * free as f64).then(|| {
        format!(
            "its {} ranks keep {} between steps, and {} of memory are free here",
            program.meta.world,
            Bytes(needed),
            Bytes(free)
        )
    })
}

/// Free memory of the machine, where the system says it.
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
}
