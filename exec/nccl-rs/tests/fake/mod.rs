//! A table of functions in place of the library: they record their arguments and return what tests
//! request.

use nccl_rs::Nccl;
use nccl_rs::ffi::*;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

type Hook = (&'static str, Box<dyn FnOnce()>);

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    /// The last communicator that this thread created.
    static MADE: Cell<Option<&'static Comm>> = const { Cell::new(None) };
    /// Whether splits return at once and complete later, like those of nonblocking parents.
    pub(crate) static LATE: Cell<bool> = const { Cell::new(false) };
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<RawResult> = const { Cell::new(SUCCESS) };
    /// Result of `ncclGroupEnd`.
    pub(crate) static GROUP_END: Cell<RawResult> = const { Cell::new(SUCCESS) };
    /// Configuration of the last communicator that was created.
    pub(crate) static CONFIG: Cell<Option<RawConfig>> = const { Cell::new(None) };
    pub(crate) static SCALAR: Cell<(u64, c_int, c_int)> = const { Cell::new((0, 0, 0)) };
}

/// A communicator, as seen by another thread. Never freed, so that uses after its end are detected.
#[derive(Default)]
pub(crate) struct Comm {
    pub(crate) rank: AtomicI32,
    pub(crate) size: AtomicI32,
    pub(crate) state: AtomicI32,
    /// Number of queries that report an operation in progress; negative means always.
    pub(crate) under_way: AtomicI32,
    /// Number of queries of the state.
    pub(crate) looks: AtomicUsize,
    pub(crate) freed: AtomicUsize,
    /// Pointer to the configuration's name.
    name: AtomicPtr<c_char>,
    /// Address at which a late split or window writes its handle, and the handle.
    place: AtomicPtr<RawComm>,
    child: AtomicPtr<c_void>,
}

impl Comm {
    /// Reads the name from the configuration's pointer.
    pub(crate) fn name(&self) -> String {
        let name = self.name.load(Ordering::SeqCst);
        // SAFETY: users of NCCL keep the strings of configurations alive.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    /// Completes a late split or window.
    pub(crate) fn deliver(&self) {
        let place = self.place.swap(std::ptr::null_mut(), Ordering::SeqCst);
        if !place.is_null() {
            // SAFETY: users of NCCL keep the location until the split has completed.
            unsafe { *place = self.child.load(Ordering::SeqCst) };
        }
        self.under_way.store(0, Ordering::SeqCst);
    }

    /// Returns the communicator of a late split.
    pub(crate) fn child(&self) -> &'static Self {
        comm(self.child.load(Ordering::SeqCst))
    }
}

/// Returns the last communicator that this thread created.
pub(crate) fn made() -> &'static Comm {
    MADE.get().unwrap()
}

/// Runs `hook` within the next call whose record starts with a prefix.
pub(crate) fn within(call: &'static str, hook: impl FnOnce() + 'static) {
    HOOK.set(Some((call, Box::new(hook))));
}

pub(crate) fn note(text: String) {
    let hook = HOOK.take();
    if let Some((call, hook)) = hook {
        if text.starts_with(call) {
            hook();
        } else {
            HOOK.set(Some((call, hook)));
        }
    }
    CALLS.with_borrow_mut(|c| c.push(text));
}

/// Returns the calls since the last query.
pub(crate) fn calls() -> Vec<String> {
    CALLS.take()
}

/// Sets the result of the next call.
pub(crate) fn answer(result: RawResult) {
    NEXT.set(result);
}

fn done(text: String) -> RawResult {
    note(text);
    NEXT.replace(SUCCESS)
}

fn comm(handle: RawComm) -> &'static Comm {
    // SAFETY: handles are leaked boxes of `make`.
    unsafe { &*handle.cast::<Comm>() }
}

fn make(size: c_int, rank: c_int, name: *mut c_char) -> RawComm {
    let comm: &'static Comm = Box::leak(Box::new(Comm {
        rank: rank.into(),
        size: size.into(),
        name: name.into(),
        ..Comm::default()
    }));
    MADE.set(Some(comm));
    std::ptr::from_ref(comm).cast_mut().cast()
}

unsafe extern "C" fn get_version(v: *mut c_int) -> RawResult {
    unsafe { *v = 22809 };
    SUCCESS
}
unsafe extern "C" fn get_unique_id(id: *mut RawUniqueId) -> RawResult {
    unsafe { (*id).internal = [7; 128] };
    done("unique id".into())
}
unsafe extern "C" fn get_error_string(code: RawResult) -> *const c_char {
    match code {
        3 => c"internal error".as_ptr(),
        5 => c"invalid usage".as_ptr(),
        6 => c"remote process exited".as_ptr(),
        _ => c"other".as_ptr(),
    }
}
unsafe extern "C" fn get_last_error(_: RawComm) -> *const c_char {
    c"line 1 of its reason\n".as_ptr()
}
unsafe extern "C" fn init(
    out: *mut RawComm,
    size: c_int,
    id: RawUniqueId,
    rank: c_int,
    config: *mut RawConfig,
) -> RawResult {
    let config = unsafe { *config };
    CONFIG.set(Some(config));
    let result = done(format!("init {rank}/{size} id {}", id.internal[127]));
    if result == SUCCESS || result == IN_PROGRESS {
        let handle = make(size, rank, config.comm_name.cast_mut());
        let looks = c_int::from(result == IN_PROGRESS);
        comm(handle).under_way.store(looks, Ordering::SeqCst);
        unsafe { *out = handle };
    }
    result
}
unsafe extern "C" fn finalize(_: RawComm) -> RawResult {
    done("finalize".into())
}
unsafe extern "C" fn destroy(c: RawComm) -> RawResult {
    comm(c).freed.fetch_add(1, Ordering::SeqCst);
    done("destroy".into())
}
unsafe extern "C" fn abort(c: RawComm) -> RawResult {
    // It waits for the thread of a late split.
    comm(c).deliver();
    comm(c).freed.fetch_add(1, Ordering::SeqCst);
    done("abort".into())
}
unsafe extern "C" fn async_error(c: RawComm, out: *mut RawResult) -> RawResult {
    let comm = comm(c);
    comm.looks.fetch_add(1, Ordering::SeqCst);
    let looks = comm.under_way.load(Ordering::SeqCst);
    if looks > 0 {
        comm.under_way.fetch_sub(1, Ordering::SeqCst);
    } else if looks == 0 {
        comm.deliver();
    }
    let state = comm.state.load(Ordering::SeqCst);
    unsafe { *out = if looks == 0 { state } else { IN_PROGRESS } };
    SUCCESS
}
unsafe extern "C" fn count(c: RawComm, out: *mut c_int) -> RawResult {
    unsafe { *out = comm(c).size.load(Ordering::SeqCst) };
    SUCCESS
}
unsafe extern "C" fn user_rank(c: RawComm, out: *mut c_int) -> RawResult {
    unsafe { *out = comm(c).rank.load(Ordering::SeqCst) };
    SUCCESS
}
unsafe extern "C" fn device(_: RawComm, out: *mut c_int) -> RawResult {
    unsafe { *out = 3 };
    SUCCESS
}
unsafe extern "C" fn group_start() -> RawResult {
    done("group start".into())
}
unsafe extern "C" fn group_end() -> RawResult {
    note("group end".into());
    GROUP_END.replace(SUCCESS)
}
unsafe extern "C" fn simulate_end(info: *mut RawSimInfo) -> RawResult {
    let info = unsafe { &mut *info };
    assert_eq!(
        (info.size, info.magic, info.version),
        (24, 0x7468_5283, 22809)
    );
    info.estimated_time = 12.5;
    done("simulate end".into())
}
unsafe extern "C" fn all_reduce(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    op: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "all reduce {:#x} {:#x} {n} type {t} op {op} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn reduce(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    op: c_int,
    root: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "reduce {:#x} {:#x} {n} type {t} op {op} root {root} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn broadcast(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    root: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "broadcast {:#x} {:#x} {n} type {t} root {root} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn gather(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    root: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "gather {:#x} {:#x} {n} type {t} root {root} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn scatter(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    root: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "scatter {:#x} {:#x} {n} type {t} root {root} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn all_gather(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "all gather {:#x} {:#x} {n} type {t} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn all_to_all(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "all to all {:#x} {:#x} {n} type {t} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn reduce_scatter(
    s: *const c_void,
    r: *mut c_void,
    n: usize,
    t: c_int,
    op: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "reduce scatter {:#x} {:#x} {n} type {t} op {op} stream {:#x}",
        s.addr(),
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn send(
    s: *const c_void,
    n: usize,
    t: c_int,
    peer: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "send {:#x} {n} type {t} to {peer} stream {:#x}",
        s.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn recv(
    r: *mut c_void,
    n: usize,
    t: c_int,
    peer: c_int,
    _: RawComm,
    st: RawStream,
) -> RawResult {
    done(format!(
        "recv {:#x} {n} type {t} from {peer} stream {:#x}",
        r.addr(),
        st.addr()
    ))
}
unsafe extern "C" fn split(
    c: RawComm,
    color: c_int,
    key: c_int,
    out: *mut RawComm,
    config: *mut RawConfig,
) -> RawResult {
    let inherits = config.is_null();
    let result = done(format!(
        "split colour {color} key {key} inherits {inherits}"
    ));
    let parent = comm(c);
    if color < 0 {
        return result;
    }
    let name = if inherits {
        parent.name.load(Ordering::SeqCst)
    } else {
        unsafe { (*config).comm_name.cast_mut() }
    };
    let child = make(parent.size.load(Ordering::SeqCst) / 2, key, name);
    if LATE.get() {
        unsafe { *out = std::ptr::null_mut() };
        parent.place.store(out, Ordering::SeqCst);
        parent.child.store(child, Ordering::SeqCst);
        MADE.set(Some(parent));
    } else {
        // Also for a split that failed, as in NCCL.
        unsafe { *out = child };
    }
    result
}
unsafe extern "C" fn register(
    _: RawComm,
    p: *mut c_void,
    n: usize,
    out: *mut *mut c_void,
) -> RawResult {
    unsafe { *out = std::ptr::without_provenance_mut(0x51) };
    done(format!("register {:#x} {n}", p.addr()))
}
unsafe extern "C" fn deregister(_: RawComm, h: *mut c_void) -> RawResult {
    done(format!("deregister {:#x}", h.addr()))
}
unsafe extern "C" fn window_register(
    c: RawComm,
    p: *mut c_void,
    n: usize,
    out: *mut RawWindow,
    flags: c_int,
) -> RawResult {
    let comm = comm(c);
    // It has no use for windows of odd length.
    if n.is_multiple_of(2) {
        comm.place.store(out, Ordering::SeqCst);
        let handle = std::ptr::without_provenance_mut(0x52);
        comm.child.store(handle, Ordering::SeqCst);
        if comm.under_way.load(Ordering::SeqCst) == 0 {
            comm.deliver();
        }
    }
    done(format!("window {:#x} {n} flags {flags}", p.addr()))
}
unsafe extern "C" fn window_deregister(_: RawComm, h: RawWindow) -> RawResult {
    done(format!("window gone {:#x}", h.addr()))
}
unsafe extern "C" fn mem_alloc(out: *mut *mut c_void, n: usize) -> RawResult {
    unsafe { *out = std::ptr::without_provenance_mut(0x1000) };
    done(format!("mem alloc {n}"))
}
unsafe extern "C" fn mem_free(p: *mut c_void) -> RawResult {
    done(format!("mem free {:#x}", p.addr()))
}
unsafe extern "C" fn pre_mul_sum(
    op: *mut c_int,
    scalar: *mut c_void,
    t: c_int,
    residence: c_int,
    _: RawComm,
) -> RawResult {
    let bytes = match t {
        8 => 8,
        7 => 4,
        _ => 2,
    };
    let mut value = [0u8; 8];
    // SAFETY: the scalar has its type's size.
    unsafe { std::ptr::copy_nonoverlapping(scalar.cast::<u8>(), value.as_mut_ptr(), bytes) };
    SCALAR.set((u64::from_ne_bytes(value), t, residence));
    // A number outside of the closed list.
    unsafe { *op = 0x7eed_0001 };
    done("pre mul sum".into())
}
unsafe extern "C" fn red_op_destroy(op: c_int, _: RawComm) -> RawResult {
    done(format!("op gone {op:#x}"))
}

pub(crate) fn functions() -> Functions {
    Functions {
        get_version,
        get_unique_id,
        get_error_string,
        comm_init_rank_config: init,
        comm_finalize: finalize,
        comm_destroy: destroy,
        comm_abort: abort,
        comm_get_async_error: async_error,
        comm_count: count,
        comm_cu_device: device,
        comm_user_rank: user_rank,
        group_start,
        group_end,
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        send,
        recv,
        get_last_error: Some(get_last_error),
        comm_split: Some(split),
        comm_shrink: None,
        comm_init_rank_scalable: None,
        comm_revoke: None,
        comm_register: Some(register),
        comm_deregister: Some(deregister),
        comm_window_register: Some(window_register),
        comm_window_deregister: Some(window_deregister),
        mem_alloc: Some(mem_alloc),
        mem_free: Some(mem_free),
        red_op_create_pre_mul_sum: Some(pre_mul_sum),
        red_op_destroy: Some(red_op_destroy),
        all_to_all: Some(all_to_all),
        gather: Some(gather),
        scatter: Some(scatter),
        group_simulate_end: Some(simulate_end),
    }
}

/// Returns a library of these functions.
pub(crate) fn library(functions: Functions) -> Nccl {
    // SAFETY: the functions follow the header.
    unsafe { Nccl::from_functions(functions) }.unwrap()
}
