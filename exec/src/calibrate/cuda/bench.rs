//! Devices with a program of single kernels and collectives, which measurements issue as needed.

use super::rank::{Rank, perform};
use super::recipe::Recipe;
use super::watch::{At, Doing, Watch};
use crate::device::cuda::CudaFactory;
use crate::device::{Abort, DeviceFactory, Setup, Stop};
use crate::engine::ExecOptions;
use crate::engine::step_barrier::StepBarrier;
use crate::process::World;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Limit of the device's own watchdog. The calibration's watchdog, which observes all ranks, has a
/// shorter limit.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(100);

/// A bench. Measurements add operations to its recipe, and then run on every rank.
pub(super) struct Bench<'a> {
    factory: &'a CudaFactory,
    ranks: u32,
    watch: &'a Watch,
}

impl<'a> Bench<'a> {
    /// Creates a bench of `ranks` ranks, each on its own GPU.
    pub(super) fn new(factory: &'a CudaFactory, ranks: u32, watch: &'a Watch) -> Self {
        Self {
            factory,
            ranks,
            watch,
        }
    }

    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Creates devices for the operations that `recipe` adds, and calls `on` for every rank at the
    /// same time. Returns the first rank's result.
    pub(super) fn run<R: Send + Sync, T: Send>(
        &self,
        recipe: impl FnOnce(&mut Recipe) -> R,
        on: impl Fn(&mut Rank, &R) -> Result<T, Stop> + Sync,
    ) -> Result<T, String> {
        let mut r = Recipe::new(self.ranks)?;
        let what = recipe(&mut r);
        let program = Arc::new(r.finish());
        let world = World::single_process(&program);
        let setup = Setup {
            program: Arc::clone(&program),
            options: Arc::new(ExecOptions::default()),
            abort: Arc::new(Abort::new(DEVICE_TIMEOUT)),
            session: world.process_group().next_session(),
            world,
        };
        let abort = Arc::clone(&setup.abort);
        let at = self.watch.ranks(self.ranks, &abort);
        let result = self.on_ranks(&setup, &at, &what, &on);
        self.watch.alone();
        // The error of a rank that failed on its own is more informative than that of a rank that
        // it stopped.
        self.watch.verdict().map_or(result, Err)
    }

    fn on_ranks<R: Send + Sync, T: Send>(
        &self,
        setup: &Setup,
        at: &Arc<Vec<At>>,
        what: &R,
        on: &(impl Fn(&mut Rank, &R) -> Result<T, Stop> + Sync),
    ) -> Result<T, String> {
        let abort = &setup.abort;
        let devices = self.factory.devices(setup)?;
        let barrier = StepBarrier::new(self.ranks as usize, setup.world.process_group(), abort);
        let answer = Arc::new(AtomicU64::new(0));
        let failed = || {
            abort
                .failures()
                .first()
                .map_or_else(|| "a bench stopped".to_owned(), ToString::to_string)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(devices)
                .map(|(id, device)| {
                    let rank = Rank {
                        id,
                        device,
                        program: Arc::clone(&setup.program),
                        barrier: Arc::clone(&barrier),
                        abort: Arc::clone(abort),
                        watch: self.watch.clone(),
                        at: Arc::clone(at),
                        enqueued: 0,
                        answer: Arc::clone(&answer),
                        ranks: self.ranks,
                    };
                    scope.spawn(move || {
                        let done = perform(rank, what, on);
                        at[id as usize].set(Doing::Done, 0);
                        done
                    })
                })
                .collect();
            let mut results: Vec<_> = threads
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect();
            if let Some(Err(panic)) = results.iter().find(|r| r.is_err()) {
                return Err(crate::base::failure::panic_message(&**panic));
            }
            if results.iter().any(|r| matches!(r, Ok(None))) {
                return Err(failed());
            }
            match results.swap_remove(0) {
                Ok(Some(t)) => Ok(t),
                _ => Err(failed()),
            }
        })
    }
}
