//! Kernels that are scheduled while the one before them on their stream still runs.
//!
//! With programmatic dependent launch ("CUDA C++ Programming Guide", section of that name), the GPU
//! starts the blocks of a kernel as soon as the previous kernel leaves room for them. Every
//! generated kernel first waits for the results of the previous one, and then lets the next one
//! start. So results are the same as those of launches that wait for the end. On an H200, the pause
//! between two short kernels shrinks from 2.5 to 1 us.
//!
//! Kernels that wait for other streams or GPUs must not let the next one start: its blocks could
//! take the room of the kernel that they wait for. Such kernels are not generated
//! (`device/cuda/pushes`).

/// What the definition of a kernel contains: the qualifier, or a macro of the preamble.
const KERNELS: [&str; 3] = ["KERNEL(", "KERNELS(", "__global__"];
/// First statement of a kernel.
const WAIT: &str = " wait_for_previous();";

/// Returns a source with the preamble, in which every kernel waits for the previous one.
pub(crate) fn waiting(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + 64);
    // Whether a definition has begun whose body has not.
    let mut defines = false;
    for line in source.split_inclusive('\n') {
        let code = !line.trim_start().starts_with(['#', '/']);
        let kernel = KERNELS.iter().filter_map(|k| line.find(k)).min();
        let from = match (defines, kernel.filter(|_| code)) {
            (_, Some(at)) => Some(at),
            (true, None) => Some(0),
            (false, None) => None,
        };
        let body = from.and_then(|from| line[from..].find('{').map(|at| from + at + 1));
        defines = from.is_some() && body.is_none();
        let (before, after) = line.split_at(body.unwrap_or(line.len()));
        out += before;
        if body.is_some() {
            out += WAIT;
        }
        out += after;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_waits_first() {
        let source = "#define KERNEL(threads) extern \"C\" __global__ void\n\
             // A KERNEL( in a comment {\n\
             DEV void f() { }\n\
             DEV int g() { return 1; }KERNEL(256) k0(int n) {\n  f();\n}\n\
             extern \"C\" __global__ void __launch_bounds__(1) k1(\n  int n,\n  int m) {\n}\n\
             KERNEL(256) k2(const Table t) { if (t.n) { f(); } }\n";
        let expected = source
            .replace("k0(int n) {", "k0(int n) { wait_for_previous();")
            .replace("int m) {", "int m) { wait_for_previous();")
            .replace(
                "k2(const Table t) {",
                "k2(const Table t) { wait_for_previous();",
            );
        assert_eq!(waiting(source), expected);
    }
}
