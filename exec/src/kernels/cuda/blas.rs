//! cuBLASLt: descriptors, candidates, and autotuning.

mod sustained;
mod trials;

pub use trials::{Candidate, Trial};

use super::cache::Cache;
use super::error::ErrorKind;
use super::gemm::{GemmProblem, Scales, Scaling};
use super::memory::Stopwatch;
use super::{Agree, Choose};
use crate::base::element;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use shardlab_plan::ir::DType;
use shardlab_plan::program::workspace;
use std::ffi::c_void;

/// Bytes that a GEMM may use in addition to its operands.
pub(super) const WORKSPACE: usize = workspace::GEMM as usize;
/// Number of candidates that are timed.
const CANDIDATES: usize = 8;
/// A candidate wins over an earlier one only if it takes at most this fraction of its time: the
/// candidates are in the library's order of preference, and noise should not decide.
pub(super) const BETTER: f32 = 0.985;

/// The library's handle, and the properties that choices depend on.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    /// GPU and library version, for which choices are kept.
    machine: String,
    tf32: bool,
    choose: Choose,
}

// SAFETY: the handle may be used from any thread (cuBLASLt's documentation); descriptors are used
// by their owner alone.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Send for Plan {}

/// A GEMM that is ready to be launched.
pub(super) struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    /// In the library's order: its `A` is our `b`.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algo: sys::cublasLtMatmulAlgo_t,
    /// Factors of the matmul and of the accumulator.
    pub(super) alpha: f32,
    pub(super) beta: f32,
    /// Description of the choice, for reports.
    pub(super) choice: String,
}

fn check(call: &'static str, status: sys::cublasStatus_t) -> Result<(), ErrorKind> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(ErrorKind::Driver {
            call,
            reason: format!("{other:?}"),
        }),
    }
}

fn data_type(ty: DType) -> Result<sys::cudaDataType, ErrorKind> {
    element::cuda(ty)
        .blas
        .ok_or_else(|| ErrorKind::Unsupported(format!("no matmul for elements of type {ty}")))
}

/// Addresses of a GEMM's operands.
#[derive(Clone, Copy)]
pub(super) struct Addresses {
    pub(super) a: CUdeviceptr,
    pub(super) b: CUdeviceptr,
    /// The reciprocals of the scales of `a` and `b`, if these are in 8 bits.
    pub(super) inverses: Option<[CUdeviceptr; 2]>,
    pub(super) bias: CUdeviceptr,
    pub(super) before: CUdeviceptr,
    pub(super) c: CUdeviceptr,
    pub(super) workspace: CUdeviceptr,
}

/// Makes the error of a GEMM that the library does not support.
fn unsupported(p: &GemmProblem) -> ErrorKind {
    let [a, b] = p.factors;
    let mut why = format!(
        "cuBLASLt has no matmul of {a} and {b} inputs with a {} result",
        p.result
    );
    if p.scaling
        .is_some_and(|scaling| scaling.of[0] != Scales::Whole)
    {
        why += "; scales of rows and blocks need compute capability 9.0 and cuBLAS 12.9";
    }
    if a == DType::F32 && p.result != DType::F32 {
        why +=
            "; precision.reduce_dtype = \"f32\" keeps the gradients of float32 weights in float32";
    }
    ErrorKind::Unsupported(why)
}

impl Blas {
    /// Opens the library for the current context.
    pub(super) fn new(gpu: &str, tf32: bool, choose: Choose) -> Result<Self, ErrorKind> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded; the handle is written before it is read.
        let (status, version) = unsafe {
            (
                sys::cublasLtCreate(&raw mut handle),
                sys::cublasLtGetVersion(),
            )
        };
        check("cublasLtCreate", status)?;
        Ok(Self {
            handle,
            machine: format!("{gpu} cublasLt {version}"),
            tf32,
            choose,
        })
    }

    /// Prepares a GEMM, with the choice on disk or by timing candidates; if ranks agree, with the
    /// leading rank's choice.
    pub(super) fn plan(
        &self,
        p: &GemmProblem,
        cache: &Cache,
        agree: Option<&dyn Agree>,
    ) -> Result<Plan, ErrorKind> {
        let mut plan = self.describe(p)?;
        let tf32 = if self.tf32 { "tf32" } else { "" };
        let key = Cache::key(&[self.choose.kind(), &self.machine, tf32, &format!("{p:?}")]);
        let name = format!("{tf32}{p:?}");
        let (algo, choice) = super::agreed(
            agree,
            (&name, &self.machine),
            &mut || self.choose(&plan, p, &key, cache),
            |packed| unpack(packed).filter(|(algo, _)| self.fits(&plan, algo)),
        )?;
        plan.algo = algo;
        plan.choice = choice;
        Ok(plan)
    }

    /// Makes this rank's own choice.
    fn choose(
        &self,
        plan: &Plan,
        p: &GemmProblem,
        key: &str,
        cache: &Cache,
    ) -> Result<Vec<u8>, ErrorKind> {
        if let Some(kept) = cache.get(key, "algo")
            && unpack(&kept).is_some_and(|(algo, _)| self.fits(plan, &algo))
        {
            return Ok(kept);
        }
        let loaded = self.choose == Choose::Load;
        let most = if loaded { sustained::MORE } else { CANDIDATES };
        let found = self.candidates(plan, p, most)?;
        let (best, micros) = match self.choose {
            Choose::Load if found.len() > 1 => self.steadiest(plan, p, &found)?,
            Choose::Burst if found.len() > 1 => self.fastest(plan, p, &found)?,
            _ => (0, None),
        };
        let when = if loaded { "under load" } else { "alone" };
        let time = micros.map_or(String::new(), |t| format!(", {t:.1} us {when}"));
        let choice = format!("cuBLASLt candidate {} of {}{time}", best + 1, found.len());
        let packed = pack(&found[best], &choice);
        if self.choose != Choose::First {
            cache.put(key, "algo", &packed);
        }
        Ok(packed)
    }

    fn describe(&self, p: &GemmProblem) -> Result<Plan, ErrorKind> {
        let compute = match (p.factors, self.tf32) {
            ([DType::F32, _], true) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let [of_a, of_b] = [data_type(p.factors[0])?, data_type(p.factors[1])?];
        let result = data_type(p.result)?;
        let mut plan = Plan {
            desc: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 4],
            algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            alpha: 1.0,
            beta: if p.accumulate { 1.0 } else { 0.0 },
            choice: String::new(),
        };
        // `cublasOperation_t`: as stored, or transposed.
        let op = |t: bool| -> i32 { i32::from(t) };
        use sys::cublasLtMatmulDescAttributes_t as Attr;
        // SAFETY: descriptors are created before their attributes are set, with values of the
        // attributes' types and sizes.
        unsafe {
            check(
                "cublasLtMatmulDescCreate",
                sys::cublasLtMatmulDescCreate(
                    &raw mut plan.desc,
                    compute,
                    sys::cudaDataType::CUDA_R_32F,
                ),
            )?;
            set(plan.desc, Attr::CUBLASLT_MATMUL_DESC_TRANSA, &op(p.tb))?;
            set(plan.desc, Attr::CUBLASLT_MATMUL_DESC_TRANSB, &op(p.ta))?;
            if let Some(bias) = p.bias {
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                set(plan.desc, Attr::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
                let ty = data_type(bias)?;
                set(plan.desc, Attr::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &ty)?;
            }
            if let Some(scaling) = p.scaling {
                describe_scaling(plan.desc, scaling)?;
                // Choices depend on whether there are scales, not on where they are.
                set_inverses(plan.desc, [WORKSPACE as CUdeviceptr; 2])?;
            }
            // Stored row-major, a matrix is its transpose column-major.
            let stored =
                |t: bool, rows: u64, cols: u64| if t { (rows, cols) } else { (cols, rows) };
            let (b, a) = (stored(p.tb, p.k, p.n), stored(p.ta, p.m, p.k));
            let shapes = [
                (of_b, b, p.pitch[1]),
                (of_a, a, p.pitch[0]),
                (result, (p.n, p.m), p.pitch[2]),
                (result, (p.n, p.m), p.pitch[3]),
            ];
            for (layout, (ty, (rows, cols), pitch)) in plan.layouts.iter_mut().zip(shapes) {
                check(
                    "cublasLtMatrixLayoutCreate",
                    sys::cublasLtMatrixLayoutCreate(layout, ty, rows, cols, pitch as i64),
                )?;
            }
        }
        Ok(plan)
    }

    /// Returns whether a cached choice still works.
    fn fits(&self, plan: &Plan, algo: &sys::cublasLtMatmulAlgo_t) -> bool {
        let [a, b, c, d] = plan.layouts;
        // SAFETY: all descriptors are live; the result is written before it is read.
        unsafe {
            let mut result = std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>();
            let status = sys::cublasLtMatmulAlgoCheck(
                self.handle,
                plan.desc,
                a,
                b,
                c,
                d,
                algo,
                &raw mut result,
            );
            status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.workspaceSize <= WORKSPACE
        }
    }

    /// Returns the library's candidates, best first by its estimate.
    fn candidates(
        &self,
        plan: &Plan,
        p: &GemmProblem,
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, ErrorKind> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attr;
        let [a, b, c, d] = plan.layouts;
        let mut pref = std::ptr::null_mut();
        let mut count = 0;
        // SAFETY: zeros are a valid value of the result's fields.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; sustained::MORE] =
            unsafe { std::mem::zeroed() };
        // SAFETY: the preference is created before it is used and destroyed once; values have the
        // attributes' types and sizes; there is room for as many results as are requested.
        let status = unsafe {
            check(
                "cublasLtMatmulPreferenceCreate",
                sys::cublasLtMatmulPreferenceCreate(&raw mut pref),
            )?;
            let put = |attr, value: *const c_void, size| {
                sys::cublasLtMatmulPreferenceSetAttribute(pref, attr, value, size)
            };
            let workspace = WORKSPACE as u64;
            put(
                Attr::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                8,
            );
            // Parts of the inner dimension may be added up from the workspace, in order, but not
            // with atomics.
            let schemes = 2u32;
            put(
                Attr::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const schemes).cast(),
                4,
            );
            let alignments = [p.align[1], p.align[0], p.align[2], p.align[3]];
            let attrs = [
                Attr::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attr::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attr::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attr::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ];
            for (attr, align) in attrs.into_iter().zip(alignments) {
                let align = u32::from(align);
                put(attr, (&raw const align).cast(), 4);
            }
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.desc,
                a,
                b,
                c,
                d,
                pref,
                most.min(found.len()) as i32,
                found.as_mut_ptr(),
                &raw mut count,
            );
            sys::cublasLtMatmulPreferenceDestroy(pref);
            status
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Err(unsupported(p));
        }
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        let good = found[..count as usize]
            .iter()
            .filter(|r| r.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        let found: Vec<_> = good.map(|r| r.algo).collect();
        if found.is_empty() {
            return Err(ErrorKind::Unsupported(format!(
                "cuBLASLt has no algorithm for {p:?}"
            )));
        }
        Ok(found)
    }

    /// Returns the microseconds of each candidate in a short burst; infinite for those that do not
    /// run.
    fn bursts(
        &self,
        plan: &Plan,
        p: &GemmProblem,
        found: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<Vec<f32>, ErrorKind> {
        // Numbers as in training: repeated numbers take less power, so the clock would stay higher
        // than it will.
        let load = sustained::Load::of_sets(p, 1)?;
        let at = load.set(0);
        let watch = Stopwatch::new()?;
        watch.bursts(found.len(), |i| {
            // SAFETY: the operands have the lengths of the shapes, and nothing else uses them.
            unsafe { self.run(plan, &found[i], at, watch.stream()) }
        })
    }

    /// Returns the fastest candidate and its time.
    fn fastest(
        &self,
        plan: &Plan,
        p: &GemmProblem,
        found: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<(usize, Option<f32>), ErrorKind> {
        let times = self.bursts(plan, p, found)?;
        let best = ahead(times.iter().copied(), BETTER);
        Ok((best.unwrap_or(0), best.map(|i| times[i])))
    }

    /// Launches a GEMM.
    ///
    /// # Safety
    /// The operands have the sizes of the plan's shapes and live until the stream has done the
    /// work; the workspace has [`WORKSPACE`] bytes that only this stream uses.
    pub(super) unsafe fn launch(
        &self,
        plan: &Plan,
        at: Addresses,
        stream: CUstream,
    ) -> Result<(), ErrorKind> {
        // SAFETY: the caller's contract.
        unsafe { self.run(plan, &plan.algo, at, stream) }
    }

    unsafe fn run(
        &self,
        plan: &Plan,
        algo: &sys::cublasLtMatmulAlgo_t,
        at: Addresses,
        stream: CUstream,
    ) -> Result<(), ErrorKind> {
        let [a, b, c, d] = plan.layouts;
        // SAFETY: the caller's contract covers the operands; descriptors are live.
        unsafe {
            if at.bias != 0 {
                let bias = at.bias as *const c_void;
                set(
                    plan.desc,
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                    &bias,
                )?;
            }
            if let Some(inverses) = at.inverses {
                set_inverses(plan.desc, inverses)?;
            }
            let status = sys::cublasLtMatmul(
                self.handle,
                plan.desc,
                (&raw const plan.alpha).cast(),
                at.b as *const c_void,
                a,
                at.a as *const c_void,
                b,
                (&raw const plan.beta).cast(),
                at.before as *const c_void,
                c,
                at.c as *mut c_void,
                d,
                algo,
                at.workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            );
            check("cublasLtMatmul", status)
        }
    }
}

/// Returns the bytes of a GEMM's operands: `a`, `b`, the result, the bias, and the reciprocals of
/// scales.
fn sizes(p: &GemmProblem) -> [u64; 6] {
    let ([of_a, of_b], rs) = (p.factors.map(DType::size), p.result.size());
    let rows = |t: bool, a: u64, b: u64| if t { b } else { a };
    let scales = |n: usize, rows: u64| p.scaling.map_or(1, |of| of.of[n].count(rows, p.k));
    [
        rows(p.ta, p.m, p.k) * p.pitch[0] * of_a,
        rows(p.tb, p.k, p.n) * p.pitch[1] * of_b,
        p.m * p.pitch[3].max(p.pitch[2]) * rs,
        p.n * 4,
        scales(0, p.m) * 4,
        scales(1, p.n) * 4,
    ]
}

/// Returns the index with the least time, where a later one must take at most a given fraction of
/// an earlier one's.
pub(super) fn ahead(times: impl IntoIterator<Item = f32>, part: f32) -> Option<usize> {
    let (mut best, mut least) = (None, f32::INFINITY);
    for (i, time) in times.into_iter().enumerate() {
        if time < least * part {
            (best, least) = (Some(i), time);
        }
    }
    best
}

/// Sets an attribute of a GEMM's descriptor.
///
/// # Safety
/// The descriptor is live and `T` is the attribute's type.
unsafe fn set<T>(
    desc: sys::cublasLtMatmulDesc_t,
    attr: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), ErrorKind> {
    let value: *const T = value;
    // SAFETY: the caller's contract; the value lives through the call, which copies it.
    let status =
        unsafe { sys::cublasLtMatmulDescSetAttribute(desc, attr, value.cast(), size_of::<T>()) };
    check("cublasLtMatmulDescSetAttribute", status)
}

/// Sets how 8-bit factors are scaled and added up.
///
/// # Safety
/// The descriptor is live.
unsafe fn describe_scaling(
    desc: sys::cublasLtMatmulDesc_t,
    scaling: Scaling,
) -> Result<(), ErrorKind> {
    use sys::cublasLtMatmulDescAttributes_t as Attr;
    use sys::cublasLtMatmulMatrixScale_t as Scale;
    let fast = i8::from(scaling.fast);
    // SAFETY: the caller's contract; values have the attributes' types.
    unsafe {
        set(desc, Attr::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast)?;
        // The library's `A` is our `b`.
        for (attr, of) in [
            (Attr::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scaling.of[1]),
            (Attr::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scaling.of[0]),
        ] {
            let mode = match of {
                // What descriptors start with, also where a library has no such attribute.
                Scales::Whole => continue,
                Scales::Rows => Scale::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
                Scales::RowBlocks => Scale::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                Scales::Squares => Scale::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
            };
            set(desc, attr, &mode)?;
        }
    }
    Ok(())
}

/// Sets the addresses of the reciprocals of the scales of `a` and `b`.
///
/// # Safety
/// The descriptor is live.
unsafe fn set_inverses(
    desc: sys::cublasLtMatmulDesc_t,
    [of_a, of_b]: [CUdeviceptr; 2],
) -> Result<(), ErrorKind> {
    use sys::cublasLtMatmulDescAttributes_t as Attr;
    // The library's `A` is our `b`.
    // SAFETY: the caller's contract; the attributes are addresses.
    unsafe {
        set(desc, Attr::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b)?;
        set(desc, Attr::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a)
    }
}

fn pack(algo: &sys::cublasLtMatmulAlgo_t, choice: &str) -> Vec<u8> {
    let mut out: Vec<u8> = algo.data.iter().flat_map(|w| w.to_le_bytes()).collect();
    out.extend(choice.as_bytes());
    out
}

fn unpack(bytes: &[u8]) -> Option<(sys::cublasLtMatmulAlgo_t, String)> {
    let mut algo = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
    for (w, b) in algo.data.iter_mut().zip(bytes.get(..64)?.chunks_exact(8)) {
        *w = u64::from_le_bytes(b.try_into().ok()?);
    }
    Some((algo, String::from_utf8(bytes[64..].to_vec()).ok()?))
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle was created and is destroyed once.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: what was created is destroyed once.
        unsafe {
            for l in self.layouts {
                if !l.is_null() {
                    sys::cublasLtMatrixLayoutDestroy(l);
                }
            }
            if !self.desc.is_null() {
                sys::cublasLtMatmulDescDestroy(self.desc);
            }
        }
    }
}
