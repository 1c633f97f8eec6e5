//! Memory for weights, caches and what lies between two operations: aligned to cache lines, touched only when used.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

/// The system refused memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system refused {bytes} bytes of memory")]
pub struct AllocError {
    /// How much was asked for; `u64::MAX` where the size does not fit 64 bits.
    pub bytes: u64,
}

/// A slice that starts on a page boundary. Its pages are zero and take no room until they are written.
pub struct PageSlice<T> {
    start: NonNull<T>,
    len: usize,
    owner: PhantomData<T>,
}

// SAFETY: a `PageSlice` owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for PageSlice<T> {}
// SAFETY: a shared `PageSlice` gives shared references only.
unsafe impl<T: Sync> Sync for PageSlice<T> {}

impl<T: Pod> PageSlice<T> {
    fn empty() -> Self {
        // Aligned like everything else, so that a view of it as another type is as good as any.
        const NOWHERE: NonZeroUsize = NonZeroUsize::new(SMALL_PAGE).unwrap();
        Self { start: NonNull::without_provenance(NOWHERE), len: 0, owner: PhantomData }
    }

    /// `len` elements whose bytes are all zero.
    ///
    /// # Errors
    /// [`AllocError`] if the system has not that much memory to give, or limits forbid it.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        const { assert!(align_of::<T>() <= SMALL_PAGE, "a page is aligned to 4096 bytes") };
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return Err(AllocError { bytes: u64::MAX });
        };
        if bytes == 0 {
            return Ok(Self { len, ..Self::empty() });
        }
        let start = map(bytes)?;
        Ok(Self { start: start.cast(), len, owner: PhantomData })
    }

    /// As [`PageSlice::zeroed`], in pages of 2 MiB as far as whole ones fit in; those are then also taken from the system
    /// 2 MiB at a time. Where the system has none to give, all is as with small pages.
    ///
    /// # Errors
    /// As [`PageSlice::zeroed`].
    pub fn zeroed_in_huge_pages(len: usize) -> Result<Self, AllocError> {
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes < HUGE_PAGE || bytes > isize::MAX as usize - HUGE_PAGE {
            return Self::zeroed(len);
        }
        // The system puts mappings anywhere: of a larger one, what begins with a huge page is kept.
        let mapped = map(bytes + HUGE_PAGE)?;
        let before = mapped.addr().get().next_multiple_of(HUGE_PAGE) - mapped.addr().get();
        // SAFETY: asks for a constant.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(HUGE_PAGE);
        let used = bytes.next_multiple_of(page);
        // SAFETY: all three pieces lie in the mapping just made, and nobody has seen it; the first and the last begin and
        // end with pages and are given back, and advice about the middle does not change what it holds.
        let start = unsafe {
            let start = mapped.add(before);
            for (start, bytes) in [(mapped, before), (start.add(used), HUGE_PAGE - before - (used - bytes))] {
                if bytes > 0 {
                    libc::munmap(start.as_ptr().cast(), bytes);
                }
            }
            #[cfg(target_os = "linux")]
            libc::madvise(start.as_ptr().cast(), used, libc::MADV_HUGEPAGE);
            start
        };
        Ok(Self { start: start.cast(), len, owner: PhantomData })
    }
}

/// The smallest page that systems have.
const SMALL_PAGE: usize = 4096;

const HUGE_PAGE: usize = 2 << 20;

/// New memory, all zero.
fn map(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // SAFETY: asks for new anonymous memory at an address of the kernel's choice; nothing existing is touched.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    NonNull::new(start.cast::<u8>())
        .filter(|start| start.as_ptr().cast() != libc::MAP_FAILED)
        .ok_or(AllocError { bytes: bytes as u64 })
}

/// Room for what one operation leaves to the next, kept from call to call.
#[derive(Debug)]
pub struct Scratch<T>(PageSlice<T>);

impl<T: Pod> Default for Scratch<T> {
    fn default() -> Self {
        Self(PageSlice::empty())
    }
}

impl<T: Pod> Scratch<T> {
    /// `len` elements that hold anything: write before you read.
    ///
    /// # Panics
    /// If the system refuses the memory.
    pub fn take(&mut self, len: usize) -> &mut [T] {
        if self.0.len < len {
            *self = Self::default();
            // Rows of a tile are far apart: with small pages of the system each would be a walk through its tables.
            let grown = PageSlice::zeroed_in_huge_pages(len.next_power_of_two());
            self.0 = grown.unwrap_or_else(|error| panic!("{error}"));
        }
        &mut self.0[..len]
    }
}

impl<T> Deref for PageSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `zeroed` mapped room for `len` elements, all zero, which is a value of every Pod type.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for PageSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the mapping is private to this value, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for PageSlice<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        if bytes > 0 {
            // SAFETY: the mapping was made by `zeroed` with this length and nothing borrows it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), bytes) };
        }
    }
}

impl<T> fmt::Debug for PageSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageSlice").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_aligned() {
        let mut slice = PageSlice::<f32>::zeroed(5000).unwrap();
        assert!(slice.iter().all(|x| *x == 0.0));
        assert_eq!(slice.as_ptr().addr() % 4096, 0);
        slice[4999] = 1.0;
        assert_eq!(slice[4999], 1.0);
        assert!(PageSlice::<u8>::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn huge_pages_begin_where_huge_pages_do() {
        for len in [1, 4095, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (5 << 20) + 4096] {
            let mut slice = PageSlice::<u8>::zeroed_in_huge_pages(len).unwrap();
            assert!(slice.iter().all(|byte| *byte == 0) && slice.len() == len);
            assert!(len < HUGE_PAGE || slice.as_ptr().addr().is_multiple_of(HUGE_PAGE));
            slice[len - 1] = 1;
        }
        assert!(PageSlice::<u64>::zeroed_in_huge_pages(usize::MAX / 4).is_err());
    }

    #[test]
    fn scratch_grows_and_is_kept() {
        let mut scratch = Scratch::<u32>::default();
        assert!(scratch.take(0).is_empty());
        scratch.take(100).fill(7);
        assert_eq!(scratch.take(60), [7; 60]);
        assert_eq!(scratch.take(1 << 20).len(), 1 << 20);
    }

    #[test]
    #[should_panic(expected = "refused")]
    fn too_much_scratch_is_a_panic() {
        Scratch::<u64>::default().take(1 << 59);
    }

    #[test]
    fn too_much_is_an_error() {
        assert_eq!(PageSlice::<f32>::zeroed(usize::MAX / 2).unwrap_err(), AllocError { bytes: u64::MAX });
        let bytes = 1 << 60;
        assert_eq!(PageSlice::<u8>::zeroed(bytes).unwrap_err(), AllocError { bytes: bytes as u64 });
    }
}
