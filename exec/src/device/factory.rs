//! What makes the devices of a session's ranks.

use super::Device;
use super::abort::Abort;
use super::cpu::{CpuDevice, CpuWorld, Launcher, launch};
use crate::engine::{ExecOptions, World};
use shardlab_plan::Program;
use std::sync::Arc;

/// What devices are made for.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The program that they will perform.
    pub program: Arc<Program>,
    /// Options of the session.
    pub options: Arc<ExecOptions>,
    /// Where devices report failures, and hear of those of others: every wait of a device ends when it is set.
    pub abort: Arc<Abort>,
    /// Ranks of this process and the way to the others, by which devices agree on communicators.
    pub world: World,
    /// Number of the session among those of the run: equal on all processes, and part of the keys by which devices find
    /// one another.
    pub session: u32,
}

/// Makes the devices of the ranks that a process performs.
pub trait DeviceFactory {
    /// Kind of device.
    type Device: Device;

    /// One device for each rank of [`World::local`], in order. Called once, by every process of the world at the same
    /// time, so devices may wait for one another here.
    ///
    /// # Errors
    /// In words: what is missing, and where it was looked for.
    fn devices(&self, setup: &Setup) -> Result<Vec<Self::Device>, String>;
}

/// The CPU: ranks are threads (or, slowly, processes), streams are threads of theirs.
#[derive(Clone, Copy, Debug)]
pub struct CpuFactory {
    launcher: Launcher,
}

impl CpuFactory {
    /// With kernels from elsewhere.
    #[must_use]
    pub fn with_launcher(launcher: Launcher) -> Self {
        Self { launcher }
    }
}

impl Default for CpuFactory {
    fn default() -> Self {
        Self::with_launcher(launch)
    }
}

impl DeviceFactory for CpuFactory {
    type Device = CpuDevice;

    fn devices(&self, setup: &Setup) -> Result<Vec<CpuDevice>, String> {
        let (program, abort) = (Arc::clone(&setup.program), Arc::clone(&setup.abort));
        let world = if setup.world.local().len() as u32 == setup.world.size() {
            CpuWorld::new(program, abort)
        } else {
            CpuWorld::of_process(program, abort, setup.world.peers())
        };
        let cpu = setup.options.cpu();
        setup
            .world
            .local()
            .map(|rank| world.device(rank, &cpu, self.launcher))
            .collect()
    }
}
