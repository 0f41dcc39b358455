//! Writes files completely or not at all.
//!
//! A file appears under its name only when all of it is on disk. Until then it is a temporary file
//! in the same folder, which is removed after any failure. Pipes and devices have no content to
//! protect and are written directly.

use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Prefix and suffix of temporary files: hidden, and without the extension of the final file.
const PART: (&str, &str) = (".", ".part");

/// What happens to an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is replaced atomically. A link is kept: its target is replaced.
    Replace,
    /// It is kept, and the write fails with [`ErrorKind::AlreadyExists`].
    Keep,
}

/// Creates a file with the output of `fill`, or replaces an existing one. On failure, the file is
/// unchanged.
///
/// # Errors
/// Fails if the folder or the file cannot be written, or `fill` fails.
pub fn write<T>(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<T>) -> io::Result<T> {
    write_as(path, Existing::Replace, fill)
}

/// Like [`write()`], with a choice of what happens to an existing file.
///
/// # Errors
/// See [`write()`]; also fails with [`ErrorKind::AlreadyExists`] if an existing file is to be kept.
pub fn write_as<T>(
    path: &Path,
    existing: Existing,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<T>,
) -> io::Result<T> {
    let target = match Target::of(path, existing)? {
        Target::Stream(file) => return buffered(&file, fill),
        Target::File(target) => target,
    };
    let mut part = tempfile::Builder::new();
    part.prefix(PART.0).suffix(PART.1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        // The permissions are those of any new file: the umask applies.
        part.permissions(Permissions::from_mode(0o666));
    }
    let part = part.tempfile_in(folder(&target.path)).map_err(bare)?;
    let done = buffered(part.as_file(), fill)?;
    if let Some(permissions) = target.permissions {
        part.as_file().set_permissions(permissions)?;
    }
    part.as_file().sync_all()?;
    match existing {
        Existing::Replace => part.persist(&target.path)?,
        Existing::Keep => part.persist_noclobber(&target.path)?,
    };
    Ok(done)
}

/// Checks, before a long computation, that [`write()`] will be able to write this file. Leaves the
/// file unchanged.
///
/// # Errors
/// Fails if the folder or the file cannot be written.
pub fn check(path: &Path) -> io::Result<()> {
    match Target::of(path, Existing::Replace)? {
        Target::Stream(_) => Ok(()),
        Target::File(target) => tempfile::tempfile_in(folder(&target.path))
            .map(drop)
            .map_err(bare),
    }
}

/// Returns whether the user named a path that cannot be written: a missing folder, a folder instead
/// of a file, or no permission. Other failures, such as a full disk, are not caused by the input.
#[must_use]
pub fn is_bad_path(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::AlreadyExists
            | ErrorKind::IsADirectory
            | ErrorKind::NotADirectory
            | ErrorKind::InvalidInput
            | ErrorKind::InvalidFilename
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::Unsupported
    )
}

/// Target of a path.
enum Target {
    /// An open pipe or device.
    Stream(File),
    /// A regular file, or none yet.
    File(Regular),
}

struct Regular {
    /// Path with links resolved.
    path: PathBuf,
    /// Permissions of the file that is replaced.
    permissions: Option<Permissions>,
}

impl Target {
    fn of(path: &Path, existing: Existing) -> io::Result<Self> {
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Ok(Self::File(Regular {
                    path: path.to_owned(),
                    permissions: None,
                }));
            }
            Err(e) => return Err(e),
        };
        if existing == Existing::Keep {
            return Err(ErrorKind::AlreadyExists.into());
        }
        if metadata.is_dir() {
            return Err(ErrorKind::IsADirectory.into());
        }
        // A read-only file must not be replaced either.
        let file = File::options().write(true).open(path)?;
        if !metadata.is_file() {
            return Ok(Self::Stream(file));
        }
        Ok(Self::File(Regular {
            path: path.canonicalize()?,
            permissions: Some(metadata.permissions()),
        }))
    }
}

/// Returns the system's error without the name of the temporary file.
fn bare(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|e| e.source());
    match cause.map(ToString::to_string) {
        Some(cause) => io::Error::new(error.kind(), cause),
        None => error,
    }
}

/// Returns the folder that contains a file.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn buffered<T>(file: &File, fill: impl FnOnce(&mut dyn Write) -> io::Result<T>) -> io::Result<T> {
    let mut writer = BufWriter::with_capacity(1 << 16, file);
    let done = fill(&mut writer)?;
    writer.flush()?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the files in a folder.
    fn listed(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Writes some bytes and then fails like a full disk.
    fn runs_full(to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&[b'x'; 1 << 17])?;
        Err(ErrorKind::StorageFull.into())
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.csv");
        let error = write(&file, runs_full).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert!(!is_bad_path(&error));
        assert!(listed(dir.path()).is_empty());
        write(&file, |to| to.write_all(b"old")).unwrap();
        write(&file, runs_full).unwrap_err();
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(listed(dir.path()), ["a.csv"]);
        write(&file, |to| to.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
    }

    #[test]
    fn a_file_to_keep_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        let text = |text: &'static str| move |to: &mut dyn Write| to.write_all(text.as_bytes());
        write_as(&file, Existing::Keep, text("first")).unwrap();
        let error = write_as(&file, Existing::Keep, text("second")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&file).unwrap(), b"first");
    }

    #[test]
    fn places_that_cannot_be_written_are_bad_paths() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for bad in [
            dir.path().join("no/folder"),
            file.join("x"),
            dir.path().to_owned(),
        ] {
            let error = write(&bad, |to| to.write_all(b"x")).unwrap_err();
            assert!(is_bad_path(&error), "{}: {error}", bad.display());
            assert!(is_bad_path(&check(&bad).unwrap_err()));
        }
        check(&file).unwrap();
        check(&dir.path().join("new")).unwrap();
        assert_eq!(listed(dir.path()), ["file"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_and_permissions_stay_and_devices_are_written_directly() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, "old").unwrap();
        fs::set_permissions(&real, Permissions::from_mode(0o640)).unwrap();
        symlink("real", &link).unwrap();
        write(&link, |to| to.write_all(b"new")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        let mode = fs::metadata(&real).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        write(Path::new("/dev/null"), |to| to.write_all(b"x")).unwrap();
        assert!(!Path::new("/dev/null").is_file());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_device_is_no_bad_path() {
        let error = write(Path::new("/dev/full"), |to| to.write_all(b"x")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert!(!is_bad_path(&error));
    }
}
