//! Files of tokens.

use std::path::Path;

/// Storage of tokens in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenWidth {
    /// Every byte is a token (a text file).
    U8,
    /// 16-bit little endian.
    U16,
    /// 32-bit little endian.
    U32,
}

words!(TokenWidth {
    U8 = "uint8",
    U16 = "uint16",
    U32 = "uint32",
});

impl TokenWidth {
    /// Returns the size of a token in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Returns the storage that a file name says: 16-bit tokens for `.bin` and `.u16`, 32-bit
    /// tokens for `.u32`; `None` for other names.
    #[must_use]
    pub fn of_name(path: &Path) -> Option<Self> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("bin" | "u16") => Some(Self::U16),
            Some("u32") => Some(Self::U32),
            _ => None,
        }
    }

    /// Returns the default for a file name: [`TokenWidth::of_name`], and text for other names.
    #[must_use]
    pub fn of_file(path: &Path) -> Self {
        Self::of_name(path).unwrap_or(Self::U8)
    }

    /// Returns the tokens in stored bytes. Bytes after the last whole token are ignored.
    pub fn tokens(self, bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
        let token = |stored: &[u8]| {
            let padded = [0, 1, 2, 3].map(|i| stored.get(i).copied().unwrap_or(0));
            u32::from_le_bytes(padded)
        };
        bytes.chunks_exact(self.bytes()).map(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_little_endian() {
        let read = |width: TokenWidth| width.tokens(&[1, 2, 3, 4, 5]).collect::<Vec<_>>();
        assert_eq!(read(TokenWidth::U8), [1, 2, 3, 4, 5]);
        assert_eq!(read(TokenWidth::U16), [0x0201, 0x0403]);
        assert_eq!(read(TokenWidth::U32), [0x0403_0201]);
    }

    #[test]
    fn names_say_how_tokens_are_stored() {
        let of = |name: &str| TokenWidth::of_name(Path::new(name));
        assert_eq!(of("a/tokens.bin"), Some(TokenWidth::U16));
        assert_eq!(of("tokens.u32"), Some(TokenWidth::U32));
        assert_eq!(of("text.txt"), None);
        assert_eq!(TokenWidth::of_file(Path::new("text.txt")), TokenWidth::U8);
    }
}
