//! Lines of code in recordings.

/// Returns whether a file of a frame is the user's: neither PyTorch's nor the interpreter's.
/// Folders of users can be called `torch`, too.
pub(crate) fn is_of_user(file: &str) -> bool {
    let of_torch = [
        "site-packages/torch/",
        "dist-packages/torch/",
        // Editable installations.
        "/torch/distributed/",
        "/torch/nn/",
        "/torch/utils/",
    ];
    !of_torch.iter().any(|part| file.contains(part))
        && !file.starts_with('<')
        && !file.contains("contextlib")
}

/// Returns a line for the reader: the file without its folders, and the number.
pub(crate) fn line(file: &str, number: i64) -> String {
    format!("{}:{number}", file.rsplit('/').next().unwrap_or(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_installed_files_of_pytorch_are_skipped() {
        let layers = "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py";
        for (file, expected) in [
            ("/usr/lib/python3/dist-packages/torch/cuda/nccl.py", false),
            (layers, false),
            (
                "/home/u/pytorch/torch/distributed/distributed_c10d.py",
                false,
            ),
            ("<string>", false),
            ("/usr/lib/python3.11/contextlib.py", false),
            ("/home/user/torch/train.py", true),
        ] {
            assert_eq!(is_of_user(file), expected, "{file}");
        }
        assert_eq!(line("/home/user/torch/train.py", 77), "train.py:77");
    }
}
