//! Creation of the devices of a session's ranks.

use super::Device;
use super::cpu::{CpuDevice, CpuOptions, CpuWorld, Launcher, launch};
use crate::base::abort::Abort;
use crate::base::options::ExecOptions;
use crate::process::World;
use shardlab_plan::Program;
use std::sync::Arc;

/// Inputs of device creation.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Program that the devices will run.
    pub program: Arc<Program>,
    /// Options of the session.
    pub options: Arc<ExecOptions>,
    /// Failures of all devices. Devices report their own failures here and learn about others; a
    /// failure ends every wait of a device.
    pub abort: Arc<Abort>,
    /// Ranks of this process, and the process group in which devices agree on communicators.
    pub world: World,
    /// Index of the session in the run. It is equal on all processes, and part of the keys that
    /// devices use in the process group.
    pub session: u32,
}

/// Creates the devices of the ranks of a process.
pub trait DeviceFactory {
    /// Type of the devices.
    type Device: Device;

    /// Creates one device for each rank of [`World::local`], in order. Called once by every process
    /// of the world at the same time, so devices may wait for each other.
    ///
    /// # Errors
    /// Returns a message if a device cannot be created. It says what is missing, and where it was
    /// searched.
    fn devices(&self, setup: &Setup) -> Result<Vec<Self::Device>, String>;
}

/// Creates CPU devices: ranks are threads (or, slowly, processes), and each stream is a thread.
#[derive(Clone, Copy, Debug)]
pub struct CpuFactory {
    launcher: Launcher,
}

impl CpuFactory {
    /// Uses `launcher` instead of the crate's kernels.
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
            CpuWorld::of_process(program, abort, setup.world.process_group())
        };
        let cpu = CpuOptions::from(&*setup.options);
        setup
            .world
            .local()
            .map(|rank| world.device(rank, &cpu, self.launcher))
            .collect()
    }
}
