//! Compares how candidates are chosen: measures every GEMM of a program in bursts and under load.

use super::sustained::{Contender, Load, MORE, contenders};
use super::{Blas, CANDIDATES, ErrorKind, Plan, ahead, set};
use crate::kernels::cuda::cache::Cache;
use crate::kernels::cuda::gemm::{GemmProblem, Scales};
use crate::kernels::cuda::memory::Stopwatch;
use cudarc::cublaslt::sys;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A GEMM of a program with its candidates.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Its shape, layouts and types.
    pub gemm: String,
    /// Number of launches in a steady step.
    pub launches: usize,
    /// FLOPs of one launch.
    pub flops: f64,
    /// In the library's order; those for fewer multiprocessors come last.
    pub candidates: Vec<Candidate>,
}

/// A way to perform a GEMM.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Position in the library's list, from 1.
    pub place: usize,
    /// Numbers of its kernel, tile, stages and so on, as the library reports them.
    pub config: String,
    /// Number of multiprocessors that it was made for, if not all.
    pub sms: Option<i32>,
    /// Shortest of three runs after a pause, in microseconds; infinite if it does not run.
    pub burst: f32,
    /// Means of two passes under load, in microseconds; absent if it was not close in the burst, or
    /// time was up.
    pub sustained: Option<[f32; 2]>,
    /// Whether it is the engine's current choice.
    pub engine: bool,
}

impl Candidate {
    /// Returns the mean microseconds under load.
    #[must_use]
    pub fn steady(&self) -> Option<f32> {
        self.sustained.map(|[a, b]| (a + b) / 2.0)
    }
}

impl Trial {
    /// Returns the winner of the burst, by the engine's rule among as many candidates as it times.
    #[must_use]
    pub fn by_burst(&self) -> Option<usize> {
        let bursts = self.candidates.iter().take_while(|c| c.sms.is_none());
        ahead(bursts.take(CANDIDATES).map(|c| c.burst), super::BETTER)
    }

    /// Returns the fastest under load among those for all multiprocessors.
    #[must_use]
    pub fn by_load(&self) -> Option<usize> {
        let all = self.candidates.iter().enumerate();
        all.filter(|(_, c)| c.sms.is_none())
            .filter_map(|(i, c)| Some((i, c.steady()?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(i, _)| i)
    }

    /// Returns the engine's choice.
    #[must_use]
    pub fn by_engine(&self) -> Option<usize> {
        self.candidates.iter().position(|c| c.engine)
    }
}

/// Pause before each candidate's burst.
const PAUSE: Duration = Duration::from_millis(20);
/// Approximate number of multiprocessors that collectives leave free, on a GPU with 132.
const SMS: i32 = 108;
/// Number of backward GEMMs, heaviest first, that are tried with [`SMS`] multiprocessors.
const WITH_SMS: usize = 4;
/// Load before the first GEMM and before each, in microseconds.
const HOT: f32 = 1e6;
const WARM: f32 = 250e3;
/// Seconds that one contender takes, and the seconds before a GEMM's first contender.
const EACH: f64 = 0.47;
const FIRST: f64 = 0.9;

/// A GEMM and its candidates during the trial.
struct Tried {
    gemm: GemmProblem,
    /// For all multiprocessors, and for fewer.
    plans: Vec<Plan>,
    /// Index of the plan, and settings.
    algos: Vec<(usize, sys::cublasLtMatmulAlgo_t)>,
    trial: Trial,
}

impl Blas {
    /// Tries the GEMMs of a program, heaviest first, for about `limit`.
    pub(in crate::kernels::cuda) fn trials(
        &self,
        gemms: &BTreeMap<GemmProblem, usize>,
        cache: &Cache,
        limit: Duration,
    ) -> Result<Vec<Trial>, ErrorKind> {
        let started = Instant::now();
        let mut by_weight: Vec<_> = gemms.iter().map(|(&p, &n)| (p, n)).collect();
        by_weight.sort_by(|a, b| (flops(&b.0) * b.1 as f64).total_cmp(&(flops(&a.0) * a.1 as f64)));
        let watch = Stopwatch::new()?;
        let (mut all, mut with_sms) = (Vec::new(), 0);
        // All bursts come first, while the GPU is cool.
        for (p, launches) in by_weight {
            if started.elapsed() > limit / 3 {
                break;
            }
            // The forward multiplies by transposed weights.
            let backward = p.ta || !p.tb;
            let sms = (backward && with_sms < WITH_SMS).then_some(SMS);
            with_sms += usize::from(sms.is_some());
            all.push(self.in_bursts(p, launches, sms, cache, &watch)?);
        }
        let mut heat = HOT;
        for tried in &mut all {
            // The engine's choice is always part of the comparison, and so is the burst's winner by
            // its rule.
            let also = [tried.trial.by_engine(), tried.trial.by_burst()];
            let rows = &mut tried.trial.candidates;
            let whole = rows.iter().take_while(|c| c.sms.is_none());
            let bursts: Vec<f32> = whole.map(|c| c.burst).collect();
            let mut these = contenders(&bursts);
            let fewer =
                (bursts.len()..rows.len()).min_by(|&a, &b| rows[a].burst.total_cmp(&rows[b].burst));
            for i in also.into_iter().chain([fewer]).flatten() {
                if !these.contains(&i) && rows[i].burst.is_finite() {
                    these.push(i);
                }
            }
            let takes = FIRST + EACH * these.len() as f64;
            if started.elapsed().as_secs_f64() + takes > limit.as_secs_f64() {
                break;
            }
            let load = Load::new(&tried.gemm)?;
            let runs: Vec<Contender<'_>> = these
                .iter()
                .map(|&i| {
                    let (plan, algo) = &tried.algos[i];
                    (&tried.plans[*plan], algo, rows[i].burst)
                })
                .collect();
            let times = self.under_load(&load, &watch, &runs, heat)?;
            for (i, time) in these.into_iter().zip(times) {
                rows[i].sustained = Some(time);
            }
            heat = WARM;
        }
        Ok(all.into_iter().map(|t| t.trial).collect())
    }

    fn in_bursts(
        &self,
        p: GemmProblem,
        launches: usize,
        sms: Option<i32>,
        cache: &Cache,
        watch: &Stopwatch,
    ) -> Result<Tried, ErrorKind> {
        let chosen = self.plan(&p, cache, None)?.algo;
        let whole = self.describe(&p)?;
        let found = self.candidates(&whole, &p, MORE)?;
        let mut algos: Vec<_> = found.into_iter().map(|a| (0, a)).collect();
        if !algos.iter().any(|(_, a)| a.data == chosen.data) {
            algos.push((0, chosen));
        }
        let mut plans = vec![whole];
        if let Some(sms) = sms {
            let fewer = self.describe(&p)?;
            use sys::cublasLtMatmulDescAttributes_t as Attr;
            // SAFETY: the descriptor is live, and the attribute's type is a 32-bit integer.
            unsafe { set(fewer.desc, Attr::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms)? };
            let found = self.candidates(&fewer, &p, 2)?;
            algos.extend(found.into_iter().map(|a| (1, a)));
            plans.push(fewer);
        }
        let load = Load::of_sets(&p, 1)?;
        let at = load.set(0);
        let mut candidates = Vec::new();
        let mut places = [0, 0];
        for (plan, algo) in &algos {
            std::thread::sleep(PAUSE);
            // SAFETY: the operands have the lengths of the shapes, and nothing else uses them.
            let burst = watch.micros(3, || unsafe {
                self.run(&plans[*plan], algo, at, watch.stream())
            });
            places[*plan] += 1;
            candidates.push(Candidate {
                place: places[*plan],
                config: config(algo),
                sms: sms.filter(|_| *plan == 1),
                burst: burst.unwrap_or(f32::INFINITY),
                sustained: None,
                engine: *plan == 0 && algo.data == chosen.data,
            });
        }
        let trial = Trial {
            gemm: name(&p),
            launches,
            flops: flops(&p),
            candidates,
        };
        Ok(Tried {
            gemm: p,
            plans,
            algos,
            trial,
        })
    }
}

fn flops(p: &GemmProblem) -> f64 {
    2.0 * p.m as f64 * p.n as f64 * p.k as f64
}

fn name(p: &GemmProblem) -> String {
    let t = |t: bool| if t { "t" } else { "n" };
    let bias = if p.bias.is_some() { ", bias" } else { "" };
    let added = if p.accumulate { ", added" } else { "" };
    let scaled = match p.scaling {
        Some(scaling) => match scaling.of {
            [Scales::Whole, _] => ", scales",
            [Scales::Rows, _] => ", scales by row",
            _ => ", scales by block",
        },
        None => "",
    };
    let [a, b] = p.factors;
    let factors = if a == b {
        a.to_string()
    } else {
        format!("{a} {b}")
    };
    format!(
        "m {} n {} k {} {}{} {} to {}{bias}{added}{scaled}, pitches {:?}",
        p.m,
        p.n,
        p.k,
        t(p.ta),
        t(p.tb),
        factors,
        p.result,
        p.pitch
    )
}

/// Describes the configuration of an algorithm, as the library reports it.
fn config(algo: &sys::cublasLtMatmulAlgo_t) -> String {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attr;
    let attrs = [
        ("id", Attr::CUBLASLT_ALGO_CONFIG_ID, 4),
        ("tile", Attr::CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
        ("stages", Attr::CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
        ("cluster", Attr::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
        ("inner", Attr::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
        ("split", Attr::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4),
        ("sum", Attr::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4),
        ("swizzle", Attr::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
        ("custom", Attr::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4),
    ];
    let mut out = Vec::new();
    for (what, attr, size) in attrs {
        let (mut value, mut written) = (0u32, 0usize);
        // SAFETY: the value has room for the attribute's two or four bytes, and the rest of it is
        // 0.
        let status = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(
                algo,
                attr,
                (&raw mut value).cast(),
                size,
                &raw mut written,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            out.push(format!("{what} {value}"));
        }
    }
    out.join(" ")
}
