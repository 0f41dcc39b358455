//! Reads plain parts of `nccl.h`: structs of scalars, numbers, declared functions.

/// Text of a header.
pub(crate) struct Header(pub(crate) String);

/// A struct as laid out by a C compiler on a 64-bit machine.
pub(crate) struct Layout {
    /// Names and offsets in bytes.
    pub(crate) fields: Vec<(String, usize)>,
    /// Size in bytes.
    pub(crate) bytes: usize,
}

impl Header {
    /// Returns the value of a macro or of an enumerator.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        let words: Vec<&str> = self
            .0
            .split(|c: char| c.is_whitespace() || ",;{}".contains(c))
            .filter(|w| !w.is_empty())
            .collect();
        words.windows(3).find_map(|w| match w {
            ["#define", n, value] | [n, "=", value] if *n == name => {
                match value.strip_prefix("0x") {
                    Some(digits) => i64::from_str_radix(digits, 16).ok(),
                    None => value.parse().ok(),
                }
            }
            _ => None,
        })
    }

    /// Returns the fields of `typedef struct … { … } name;`.
    pub(crate) fn fields(&self, name: &str) -> Layout {
        let end = self.0.find(&format!("}} {name};")).expect("the struct");
        let begin = self.0[..end].rfind('{').expect("its start") + 1;
        let mut body = self.0[begin..end].to_owned();
        while let (Some(a), Some(b)) = (body.find("/*"), body.find("*/")) {
            body.replace_range(a..b + 2, "");
        }
        let (mut at, mut align, mut fields) = (0usize, 1, Vec::new());
        for line in body.split(';').map(str::trim).filter(|l| !l.is_empty()) {
            let (kind, name) = line
                .rsplit_once(|c: char| c.is_whitespace() || c == '*')
                .expect("a type and a name");
            let bytes = match kind.trim() {
                _ if line.contains('*') => 8,
                "size_t" => 8,
                "int" | "unsigned int" | "float" => 4,
                other => panic!("a field of type {other}"),
            };
            at = at.next_multiple_of(bytes);
            fields.push((name.to_owned(), at));
            at += bytes;
            align = align.max(bytes);
        }
        Layout {
            fields,
            bytes: at.next_multiple_of(align),
        }
    }

    /// Returns whether the header declares a function.
    pub(crate) fn declares(&self, name: &str) -> bool {
        self.0.contains(&format!(" {name}("))
    }
}
