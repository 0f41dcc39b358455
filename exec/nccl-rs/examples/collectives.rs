//! Runs every call on all GPUs of this machine, with one thread per GPU: checks values and times
//! sizes.
//!
//! ```sh
//! cargo run --release -p nccl-rs --example collectives [SITE_PACKAGES…]
//! ```
//!
//! Prints one line per check and a table of times. Exits with status 1 if a value is wrong.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "memory lives until the process ends and has the lengths that calls say"
)]

mod driver;

use driver::{Driver, Gpu, Kind};
use nccl_rs::{
    Communicator, Config, CtaPolicy, DataType, Nccl, RedOp, Scalar, Search, Stream, UniqueId,
    WindowKind,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

static WRONG: AtomicBool = AtomicBool::new(false);
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How memory is registered.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Off,
    Buffer,
    Window,
    /// A window, and a communicator that uses copy engines for all-gathers.
    Engines,
}

struct Rank<'a> {
    nccl: &'a Nccl,
    gpu: &'a Gpu,
    rank: u32,
    size: u32,
    ids: &'a Mutex<Vec<UniqueId>>,
    barrier: &'a Barrier,
}

impl Rank<'_> {
    /// Creates a communicator of all ranks, with the next unique id of the list.
    fn join(&self, number: usize, config: Config) -> Result<Communicator> {
        self.barrier.wait();
        if self.rank == 0 {
            let id = self.nccl.unique_id()?;
            self.ids.lock().unwrap().push(id);
        }
        self.barrier.wait();
        let id = self.ids.lock().unwrap()[number];
        Ok(Communicator::init(
            self.nccl, &id, self.size, self.rank, config,
        )?)
    }

    fn check(&self, what: &str, got: &[f32], wanted: impl Fn(usize) -> f32) {
        let bad = got.iter().enumerate().find(|(i, x)| **x != wanted(*i));
        match bad {
            None if self.rank == 0 => println!("ok    {what}"),
            None => {}
            Some((i, x)) => {
                WRONG.store(true, Ordering::Relaxed);
                println!(
                    "WRONG {what}: rank {} element {i} is {x}, not {}",
                    self.rank,
                    wanted(i)
                );
            }
        }
    }

    fn values(&self) -> Result<()> {
        let (g, n, rank) = (self.gpu, self.size as usize, self.rank as usize);
        let comm = self.join(0, Config::default())?;
        assert_eq!((comm.count()?, comm.user_rank()?), (self.size, self.rank));
        let count = 1 << 16;
        let f32 = DataType::F32;
        let mine = |i: usize| (rank * 10 + i % 7) as f32;
        let all = |r: usize, i: usize| (r * 10 + i % 7) as f32;
        let sum = |i: usize| (0..n).map(|r| all(r, i)).sum::<f32>();
        let large = g.alloc(n * count * 4, Kind::Plain)?;
        let (a, b) = (large.ptr(), g.alloc(n * count * 4, Kind::Plain)?);
        let (s, s2) = (g.stream()?, g.stream()?);
        let data: Vec<f32> = (0..n * count).map(mine).collect();
        let read = |m: &driver::Memory, n: usize| -> Result<Vec<f32>> { Ok(g.read(m, n)?) };
        unsafe {
            g.write(&large, &data)?;
            comm.all_gather(a, b.ptr(), count, f32, Stream(s))?;
            g.wait(s)?;
            self.check("all-gather", &read(&b, n * count)?, |i| {
                all(i / count, i % count)
            });
            comm.all_reduce(a, b.ptr(), count, f32, RedOp::SUM, Stream(s2))?;
            g.wait(s2)?;
            self.check("all-reduce on another stream", &read(&b, count)?, sum);
            comm.reduce_scatter(a, b.ptr(), count, f32, RedOp::AVG, Stream(s))?;
            g.wait(s)?;
            self.check("reduce-scatter, average", &read(&b, count)?, |i| {
                sum(rank * count + i) / n as f32
            });
            let half = comm.pre_mul_sum(Scalar::F32(0.5))?;
            comm.all_reduce(a, b.ptr(), count, f32, half.op(), Stream(s))?;
            g.wait(s)?;
            self.check("premultiplied sum", &read(&b, count)?, |i| sum(i) / 2.0);
            comm.broadcast(a, b.ptr(), count, f32, 1 % self.size, Stream(s))?;
            g.wait(s)?;
            self.check("broadcast", &read(&b, count)?, |i| all(1 % n, i));
            comm.all_to_all(a, b.ptr(), count, f32, Stream(s))?;
            g.wait(s)?;
            let exchanged = |i: usize| all(i / count, rank * count + i % count);
            self.check("all-to-all", &read(&b, n * count)?, exchanged);
            g.write(&b, &vec![0.0; n * count])?;
            comm.all_to_all_grouped(a, b.ptr(), count, f32, Stream(s))?;
            g.wait(s)?;
            self.check("all-to-all as a group", &read(&b, n * count)?, exchanged);
            let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
            self.nccl.group(|| {
                comm.send(a, count, f32, next as u32, Stream(s))?;
                comm.recv(b.ptr(), count, f32, before as u32, Stream(s))
            })?;
            g.wait(s)?;
            self.check("a ring of sends", &read(&b, count)?, |i| all(before, i));
            // In place: the rank's own slice of the output.
            let own = a.byte_add(rank * count * 4);
            comm.all_gather(own, a, count, f32, Stream(s))?;
            g.wait(s)?;
            self.check("all-gather in place", &read(&large, n * count)?, |i| {
                all(i / count, i)
            });
            let part = comm.split(Some(self.rank % 2), self.rank, None)?;
            let part = part.ok_or("a colour was named")?;
            assert_eq!(part.rank(), self.rank / 2);
            let estimate = self
                .nccl
                .simulate(|| comm.all_gather(a, b.ptr(), count, f32, Stream(s)))?;
            if self.rank == 0 {
                println!("ok    split; estimate of an all-gather: {estimate:?}");
            }
            part.destroy()?;
            // Another thread aborts a communicator that no one else has joined.
            self.barrier.wait();
            let watch = comm.watch();
            if self.rank == 0 && n > 1 {
                comm.all_reduce(a, b.ptr(), count, f32, RedOp::SUM, Stream(s))?;
                watch.poll()?;
                let aborting = std::thread::spawn(move || watch.abort(Duration::from_secs(5)));
                aborting.join().map_err(|_| "the thread panicked")??;
                g.wait(s)?;
                println!("ok    abort of a collective that hangs");
            }
            drop(half);
            if self.rank != 0 {
                comm.abort()?;
            }
        }
        Ok(())
    }

    /// Returns the microseconds of all-gathers and reduce-scatters, by bytes of the full side.
    fn times(&self, number: usize, mode: Mode) -> Result<()> {
        let (g, n) = (self.gpu, self.size as usize);
        let config = Config {
            cta_policy: (mode == Mode::Engines).then_some(CtaPolicy::Zero),
            ..Config::default()
        };
        let comm = self.join(number, config)?;
        let most = 512 << 20;
        let kind = if matches!(mode, Mode::Window | Mode::Engines) {
            Kind::Exportable
        } else {
            Kind::Plain
        };
        let (full, part) = (g.alloc(most, kind)?, g.alloc(most, kind)?);
        let mut known: Vec<Box<dyn std::any::Any>> = Vec::new();
        for m in [&full, &part] {
            unsafe {
                match mode {
                    Mode::Off => {}
                    Mode::Buffer => known.push(Box::new(comm.register(m.ptr(), most)?)),
                    Mode::Window | Mode::Engines => {
                        let window = comm.window(m.ptr(), most, WindowKind::Symmetric)?;
                        if window.is_none() && self.rank == 0 {
                            println!("no window is made for {mode:?}");
                        }
                        known.push(Box::new(window));
                    }
                }
            }
        }
        let s = g.stream()?;
        for shift in [16, 20, 22, 24, 26, 28] {
            let bytes = 1usize << shift;
            let count = bytes / 2 / n;
            let own = unsafe { full.ptr().byte_add(self.rank as usize * count * 2) };
            type Call<'a> = Box<dyn Fn() -> std::result::Result<(), nccl_rs::Error> + 'a>;
            let bf16 = DataType::BF16;
            let (comm, full, part) = (&comm, full.ptr(), part.ptr());
            let calls: [(&str, Call<'_>); 3] = [
                (
                    "all_gather",
                    Box::new(move || unsafe { comm.all_gather(own, full, count, bf16, Stream(s)) }),
                ),
                (
                    "reduce_scatter",
                    Box::new(move || unsafe {
                        comm.reduce_scatter(full, part, count, bf16, RedOp::SUM, Stream(s))
                    }),
                ),
                (
                    "all_reduce",
                    Box::new(move || unsafe {
                        comm.all_reduce(full, full, count * n, bf16, RedOp::SUM, Stream(s))
                    }),
                ),
            ];
            for (name, call) in calls {
                let micros = g.time(s, 3, 10, &mut || call().map_err(|e| e.to_string()))?;
                let estimate = self.nccl.simulate(&call)?;
                if self.rank == 0 {
                    let bus = bytes as f64 * (n as f64 - 1.0) / n as f64 / micros / 1e3
                        * if name == "all_reduce" { 2.0 } else { 1.0 };
                    println!(
                        "{mode:?}\t{name}\t{bytes}\t{micros:.2} us\t{bus:.1} GB/s bus\testimate {:.2} us",
                        estimate.map_or(f64::NAN, |e| e.as_secs_f64() * 1e6)
                    );
                }
            }
        }
        drop(known);
        comm.destroy()?;
        Ok(())
    }
}

fn main() -> Result<()> {
    let search = Search {
        site_packages: std::env::args_os().skip(1).map(Into::into).collect(),
        ..Search::default()
    };
    let nccl = Nccl::load(&search)?;
    println!("{nccl:?}");
    let driver = Arc::new(Driver::load()?);
    let size = driver.gpus()?;
    println!("{size} GPUs");
    let (ids, barrier) = (Mutex::new(Vec::new()), Barrier::new(size as usize));
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (nccl, driver, ids, barrier) = (&nccl, &driver, &ids, &barrier);
            scope.spawn(move || {
                let run = || -> Result<()> {
                    let gpu = Gpu::new(driver, rank)?;
                    let it = Rank {
                        nccl,
                        gpu: &gpu,
                        rank,
                        size,
                        ids,
                        barrier,
                    };
                    it.values()?;
                    let modes = [Mode::Off, Mode::Buffer, Mode::Window, Mode::Engines];
                    for (i, mode) in modes.into_iter().enumerate() {
                        it.times(i + 1, mode)?;
                    }
                    Ok(())
                };
                if let Err(e) = run() {
                    println!("FAILED rank {rank}: {e}");
                    // The other ranks wait for it.
                    std::process::exit(1);
                }
            });
        }
    });
    if WRONG.load(Ordering::Relaxed) {
        return Err("values are wrong".into());
    }
    println!("all good");
    Ok(())
}

/// Converts a pointer to the type of calls.
pub(crate) type Ptr = *mut c_void;
