//! Devices with a program of single kernels and collectives, which are issued as a measurement wants.

use super::rank::{Rank, perform};
use super::recipe::Recipe;
use super::watch::{At, Doing, Watch};
use crate::device::cuda::CudaFactory;
use crate::device::{Abort, DeviceFactory, Setup, Stop};
use crate::engine::gate::Gate;
use crate::engine::{ExecOptions, World};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The device's own watchdog. That of the calibration comes first, which knows all ranks.
const PATIENCE: Duration = Duration::from_secs(100);

/// A bench: adds what it wants to the recipe, then runs on every rank.
pub(super) struct Bench<'a> {
    factory: &'a CudaFactory,
    ranks: u32,
    watch: &'a Watch,
}

impl<'a> Bench<'a> {
    /// With so many ranks, each on a GPU of its own.
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

    /// Makes devices for what `recipe` adds and calls `on` for every rank at the same time; the first rank's result.
    pub(super) fn run<R: Send + Sync, T: Send>(
        &self,
        recipe: impl FnOnce(&mut Recipe) -> R,
        on: impl Fn(&mut Rank, &R) -> Result<T, Stop> + Sync,
    ) -> Result<T, String> {
        let mut r = Recipe::new(self.ranks)?;
        let what = recipe(&mut r);
        let program = Arc::new(r.finish());
        let world = World::alone(&program);
        let setup = Setup {
            program: Arc::clone(&program),
            options: Arc::new(ExecOptions::default()),
            abort: Arc::new(Abort::new(PATIENCE)),
            session: world.peers().next_session(),
            world,
        };
        let abort = Arc::clone(&setup.abort);
        let at = self.watch.ranks(self.ranks, &abort);
        let result = self.on_ranks(&setup, &at, &what, &on);
        self.watch.alone();
        // Whoever gave up knows more than whoever stopped for it.
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
        let gate = Gate::new(self.ranks as usize, setup.world.peers(), abort);
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
                        gate: Arc::clone(&gate),
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
                return Err(crate::device::cpu::panic_text(&**panic));
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
